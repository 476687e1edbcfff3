"""Finds models that train in eval(), and models that are evaluated in train()."""

from collections.abc import Container, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from ...recording.phase import FORWARD, PHASES
from ...recording.role import PARAMETER_GRAD
from ...recording.suggestions import count_of
from ..tables.columns import Bools, Column, Rows, column_of, columns_at, phase_codes, split_rows
from ..tables.placement import Module, read_modules
from ..tables.sampled_steps import MOST_STEPS, SampledSteps
from .check import check
from .finding import CannotCheck, Finding
from .places import place_of_module

#: The number of first training steps that say in which mode the model began.
_FIRST = 2

#: The parts of types' names by which modules are known that compute something else in training.
_BATCH_STATISTICS, _DROPS = ("BatchNorm", "InstanceNorm"), ("Dropout", "DropPath", "StochasticDepth")

#: If there are at most so many training steps for each single step of another kind, those are no evaluations.
_MOST_PER_EVALUATION = 2


@dataclass(frozen=True, kw_only=True, eq=False)
class _Modes:
    """The forward calls of some steps of which it is known whether their module was in train()."""

    step: Column
    module: Column
    is_outermost: Bools
    is_training: Bools
    root: Column  # the root of each call's module

    def take(self, rows: Rows | Bools) -> "_Modes":
        """Returns some of the calls."""
        return _Modes(**columns_at(self, rows))


@check(
    "modes", about="training in eval(), and evaluation with active dropout or batch statistics", needs="calls"
)
def MODES(run: SampledSteps, steps: int = 3) -> Iterator[Finding]:
    """Finds models that are in eval() in all of the newest training steps, and modules in train() in evaluation steps.

    Only a model counts that has modules which compute something else in training. `steps` is the smallest number of
    steps that count.
    """
    trained = _read_modes(run, run.training[-MOST_STEPS:])
    evaluation = np.setdiff1d(column_of(run.steps, "step"), run.training).astype(np.int64)
    evaluated = _read_modes(run, evaluation[-MOST_STEPS:])
    if not len(trained.step) and not len(evaluated.step):
        raise CannotCheck("it was not recorded whether modules were in train() or in eval()")
    trains = _find_trained(run)
    yield from _find_left_in_eval(run, trained, trains, steps)
    if not _is_part_of_training(run):
        teachers = [root for root in np.unique(evaluated.root).tolist() if root not in trains]
        teachers = [root for root in teachers if _is_teacher(run, root, trained, evaluated)]
        yield from _find_active(run, evaluated.take(~np.isin(evaluated.root, teachers)))


def _read_modes(run: SampledSteps, steps: Column) -> _Modes:
    names = ["step", "module_id", "phase", "parent_call_id", "training"]
    calls = run.find("calls", names, step=steps)
    training, module = column_of(calls, "training").astype(np.int64), column_of(calls, "module_id")
    rows = np.flatnonzero((training >= 0) & (phase_codes(calls["phase"]) == PHASES.index(FORWARD)))
    roots = {number: one.root_id for number, one in read_modules(run.data).items()}
    return _Modes(
        step=column_of(calls, "step")[rows],
        module=module[rows],
        is_outermost=column_of(calls, "parent_call_id")[rows] < 0,
        is_training=training[rows] == 1,
        root=np.array([roots.get(number, number) for number in module[rows].tolist()], np.int64),
    )


def _find_trained(run: SampledSteps) -> frozenset[int]:
    """Returns the roots of which a parameter got a gradient."""
    modules = read_modules(run.data)
    owners = {run.sites[site].module_id for site in run.sites_of(PARAMETER_GRAD).tolist()}
    return frozenset(modules[owner].root_id for owner in owners if owner in modules)


def _is_teacher(run: SampledSteps, root: int, trained: _Modes, evaluated: _Modes) -> bool:
    """Returns whether a model that does not train is called in training steps, or in front of half of them."""
    if (trained.root == root).any():
        return True
    called = np.unique(evaluated.step[evaluated.root == root])
    next_trained = np.unique(np.searchsorted(run.training, called))
    among = np.count_nonzero(run.training > called.min())
    return bool(_MOST_PER_EVALUATION * len(next_trained) >= among > 0)


def _find_left_in_eval(
    run: SampledSteps, modes: _Modes, trained: Container[int], steps: int
) -> Iterator[Finding]:
    """Yields each trained model that was in eval() in the last training steps, with its modules that have a mode."""
    first = _read_modes(run, run.training[:_FIRST])
    for root in np.unique(modes.root[modes.is_outermost]).tolist():
        is_own = modes.root == root
        since = modes.step[is_own & modes.is_training].max(initial=-1)
        is_left = is_own & (modes.step > since)
        depends = np.unique(modes.module[is_left & ~modes.is_outermost]).tolist()
        count = len(np.unique(modes.step[is_left]))
        if root not in trained or count < steps or not depends:
            continue
        was_training = since >= 0 or bool(first.is_training[first.root == root].any())
        began = (
            f"it was in train() up to step {since}" if since >= 0 else "it was in train() in the first steps"
        )
        place = place_of_module(run, root)
        yield Finding(
            severity="error" if was_training else "warning",
            text=f"{place.name} trains in eval(), in all of the last {count_of(count, 'training step')}",
            remedy="call model.train() before training, and again after each evaluation",
            evidence=(*([began] if was_training else []), f"as in evaluation: {_describe(run, depends)}"),
            rests_on=f"{count_of(count, 'training step')} up to {modes.step.max()}",
            step=int(modes.step[is_left].min()),
            root=place.root,
            path=place.path,
        )


def _is_part_of_training(run: SampledSteps) -> bool:
    """Returns whether the steps without gradients alternate with those that train.

    A GAN's step begins with the generator under `no_grad`, and a step with a teacher may begin with the teacher.
    """
    kinds = np.array(run.steps["kind"].to_pylist(), object) == "eval"
    begins = np.flatnonzero(kinds & ~np.append(False, kinds[:-1]))
    trains = np.count_nonzero(~kinds[begins[0] :]) if len(begins) else 0
    return bool(
        trains and np.count_nonzero(kinds) == len(begins) and trains <= _MOST_PER_EVALUATION * len(begins)
    )


def _find_active(run: SampledSteps, modes: _Modes) -> Iterator[Finding]:
    """Yields one finding on the modules that compute as in training in at least half of their evaluation steps."""
    modules = read_modules(run.data)
    active: dict[str, list[int]] = {}
    for module, rows in split_rows(np.arange(len(modes.step)), modes.module):
        kind = _kind_of(modules.get(module), is_outermost=bool(modes.is_outermost[rows].all()))
        if kind and modes.is_training[rows].mean() >= 0.5:
            active.setdefault(kind, []).append(module)
    if not active:
        return
    named = [module for of_kind in active.values() for module in of_kind]
    steps = np.unique(modes.step[modes.is_training & np.isin(modes.module, named)])
    is_whole = modes.is_training[modes.is_outermost & np.isin(modes.step, steps)].all()
    place = place_of_module(run, named[0])
    compute = "computes" if len(active) == 1 else "compute"
    yield Finding(
        severity="warning",
        text=(
            f"{' and '.join(active)} {compute} as in training in {count_of(len(steps), 'evaluation step')}: "
            f"{_describe(run, named)}"
        ),
        remedy=(
            "call model.eval() before an evaluation and model.train() after it"
            if is_whole
            else f"the model is in eval(), and {place.name} is not: see who calls train() on it"
        ),
        evidence=(
            "it is meant where the statistics of batch norm are computed again, or dropout samples models",
        ),
        rests_on=f"{count_of(len(np.unique(modes.step)), 'evaluation step')} up to {modes.step.max()}",
        step=int(steps[0]),
        root=place.root,
        path=place.path,
    )


def _kind_of(module: Module | None, *, is_outermost: bool) -> str:
    """Returns what is active in a module that is in train(); "" if it computes the same in evaluation."""
    kind = module.type if module is not None else ""
    if any(name in kind for name in _BATCH_STATISTICS):
        return "batch norm"
    if any(name in kind for name in _DROPS):
        return "dropout"
    return "" if is_outermost else kind  # of an outermost call the mode is recorded whatever it computes


def _describe(run: SampledSteps, modules: Sequence[int]) -> str:
    first = place_of_module(run, modules[0]).name
    return first if len(modules) == 1 else f"{first} and {len(modules) - 1} more"
