"""Defines `modtrace.verify`, which records a model once and proves that the recording states what ran."""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from torch import nn
from torch.nn.parameter import is_lazy

from ..recording.verification import Check, Verification
from . import checks
from .contents import aside, without_autocast
from .generators import generators_kept
from .kept_ops import OpKeep
from .model_run import Results, run_model
from .perturbing import Perturber
from .recorded_graph import RecordedGraph, read_graph
from .recorded_run import RecordedRun, record_run

#: How often a model runs again before a difference in the recorded run alone counts as the recording's fault.
_MORE_RUNS = 3

#: The remark on a model whose runs agree.
_STEADY = Check(name="determinism", passed=True, why="two unrecorded runs of the model gave the same bits")


def verify(
    model: nn.Module, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None, *, seed: int = 0
) -> Verification:
    """Records one forward and backward of a model, and proves the recording; docs/verify.md describes how.

        assert modtrace.verify(model, (tokens,), {"labels": labels})

    The backward begins at `output.loss` if there is one, else at the sum of all outputs that require a gradient. The
    model runs three times, two of them unrecorded, in its present mode (training or not) and grad mode. Its parameters,
    buffers, gradients and attributes and the random generators are restored afterwards, also if it raises.

    Args:
        model: the module to call.
        args: the positional arguments of the call.
        kwargs: the keyword arguments of the call.
        seed: of the random order in which ops run again, and of the contents that replace their inputs.

    Returns:
        what was proved, what failed, and what could not be checked. It is false if a check has failed.

    Raises:
        TypeError: `model` is not a module, `args` is not a tuple or list, or `kwargs` is not a dict.
        ValueError: the model has lazy parameters without a shape.
        Exception: what the model raises.
    """
    kwargs = {} if kwargs is None else kwargs
    if not isinstance(model, nn.Module):
        raise TypeError(f"verify(model={model!r}): give a torch.nn.Module, not a {type(model).__name__}")
    if not isinstance(args, (tuple, list)):
        raise TypeError(f"verify(args=...): give a tuple, (x,) for one argument, not a {type(args).__name__}")
    if not isinstance(kwargs, Mapping):
        raise TypeError(f"verify(kwargs=...): give a dict of names and values, not a {type(kwargs).__name__}")
    lazy = next((name for name, parameter in model.named_parameters() if is_lazy(parameter)), None)
    if lazy is not None:
        raise ValueError(
            f"{lazy}: this parameter has no shape yet, and could not be put back. Call the model once."
        )
    plain, again = (run_model(model, args, kwargs) for _ in range(2))
    recorded = record_run(model, args, kwargs)
    with generators_kept(), aside(), without_autocast():
        proof = _prove(recorded, model, seed)
    passed, unsteady = _compare_runs(plain, again, recorded.results, lambda: run_model(model, args, kwargs))
    return replace(
        proof,
        is_deterministic=not unsteady,
        checks=(*([] if unsteady else [_STEADY]), *proof.checks, *passed),
        unchecked=(*unsteady, *proof.unchecked, *recorded.results.unchecked),
    )


def _prove(run: RecordedRun, model: nn.Module, seed: int) -> Verification:
    """Returns the results of all checks of the recording itself."""
    graph, perturber = read_graph(run.data), Perturber(seed)
    shuffled = checks.check_replay_in_random_order(graph, run.keep, seed, perturber)
    return Verification(
        model=type(model).__name__,
        checks=(
            checks.check_op_count(graph, run.counted, run.data.meta.marks),
            checks.check_replay_in_order(graph, run.keep),
            shuffled,
            checks.check_perturbation(perturber, shuffled.passed),
            checks.check_undeclared_writes(graph, run.keep),
            checks.check_paths(model, run.data, run.results.modules),
        ),
        exempt=dict(perturber.exempt.most_common()),
        unchecked=(*_obstacles(graph, run.keep), *_compiled(run)),
    )


def _obstacles(graph: RecordedGraph, keep: OpKeep) -> list[tuple[str, str]]:
    """Returns the ops that cannot run again, grouped by name, each with the reason."""
    obstacles: Counter[tuple[str, str]] = Counter()
    for number in graph.ops:
        kept = keep.ops.get(number)
        if kept is not None and kept.obstacle is not None:
            obstacles[kept.name, kept.obstacle] += 1
        elif kept is not None and not kept.has_returned:
            obstacles[kept.name, "it raised an exception when it was recorded"] += 1
    return [(f"replay of {count} {name}", why) for (name, why), count in obstacles.items()]


def _compiled(run: RecordedRun) -> list[tuple[str, str]]:
    count = sum(map(bool, run.data.table("calls")["compiled"].to_pylist()))
    why = "compiled code runs past the dispatcher"
    return [(f"ops inside of {count} compiled calls", why)] if count else []


def _compare_runs(
    plain: Results, again: Results, recorded: Results, run_again: Callable[[], Results]
) -> tuple[list[Check], list[tuple[str, str]]]:
    """Compares the recorded run with an unrecorded one.

    Returns:
        the checks, and what already differs between two unrecorded runs.
    """
    results: list[Check] = []
    unsteady: list[tuple[str, str]] = []
    for compare in (checks.check_outputs, checks.check_gradients, checks.check_nothing_left):
        own, ours = compare(plain, again), compare(plain, recorded)
        if own.passed and not ours.passed:
            more = (compare(plain, run_again()) for _ in range(_MORE_RUNS))
            own = next((comparison for comparison in more if not comparison.passed), own)
        if own.passed:
            results.append(ours)
        else:
            unsteady.append((own.name, f"two unrecorded runs differ already: {own.why}"))
    return results, unsteady
