"""`modtrace.verify`: records a model once and proves that the recording says what ran."""

from collections import Counter
from collections.abc import Mapping, Sequence
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


def verify(
    model: nn.Module, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None, *, seed: int = 0
) -> Verification:
    """Records one forward and backward of a model and proves the recording; docs/verify.md says how.

        assert modtrace.verify(model, (tokens,), {"labels": labels})

    The backward begins at `output.loss`, if there is one, else at the sum of all outputs that require a gradient.
    The model runs twice or three times, in the mode (training or not) and grad mode it is in; its parameters,
    buffers, gradients and attributes and the random generators are put back afterwards, also when it raises.

    Args:
        model: the module to call.
        args: what it is called with.
        kwargs: and by name.
        seed: of the random order in which ops run again, and of what stands in for their inputs.

    Returns:
        what was proved, what not, and what could not be checked; false where a check has failed.

    Raises:
        TypeError: `model` is no module, `args` no tuple or list, or `kwargs` no dict.
        ValueError: the model has lazy parameters that have no shape yet.
        Exception: what the model raises.
    """
    _check_arguments(model, args, kwargs)
    kwargs = kwargs or {}
    plain = run_model(model, args, kwargs)
    recorded = record_run(model, args, kwargs)
    with generators_kept(), aside(), without_autocast():
        found = _prove(recorded, model, seed)
    same, unchecked = _compare_runs(model, args, kwargs, plain, recorded.results)
    nothing_left = checks.check_nothing_left(plain, recorded.results)
    return replace(
        found, checks=(*found.checks, *same, nothing_left), unchecked=(*found.unchecked, *unchecked)
    )


def _check_arguments(model: object, args: object, kwargs: object) -> None:
    if not isinstance(model, nn.Module):
        raise TypeError(f"verify(model={model!r}): give a torch.nn.Module, not a {type(model).__name__}")
    if not isinstance(args, (tuple, list)):
        raise TypeError(f"verify(args=...): give a tuple, (x,) for one argument, not a {type(args).__name__}")
    if kwargs is not None and not isinstance(kwargs, Mapping):
        raise TypeError(f"verify(kwargs=...): give a dict of names and values, not a {type(kwargs).__name__}")
    lazy = next((name for name, each in model.named_parameters() if is_lazy(each)), None)
    if lazy is not None:
        raise ValueError(
            f"{lazy}: this parameter has no shape yet, and could not be put back. Call the model once."
        )


def _prove(run: RecordedRun, model: nn.Module, seed: int) -> Verification:
    """Everything that the recording itself is asked."""
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
            checks.check_paths(model, run.data),
        ),
        exempt=dict(perturber.exempt.most_common()),
        unchecked=(*_obstacles(graph, run.keep), *_compiled(run)),
    )


def _obstacles(graph: RecordedGraph, keep: OpKeep) -> list[tuple[str, str]]:
    """The ops that cannot run again, those of one name together."""
    found: Counter[tuple[str, str]] = Counter()
    for number in graph.ops:
        kept = keep.ops.get(number)
        if kept is not None and kept.obstacle is not None:
            found[kept.name, kept.obstacle] += 1
        elif kept is not None and not kept.has_returned:
            found[kept.name, "it raised an exception when it was recorded"] += 1
    return [(f"replay of {count} {name}", why) for (name, why), count in found.items()]


def _compiled(run: RecordedRun) -> list[tuple[str, str]]:
    table = run.data.table("calls").select(["compiled"]).to_pylist()
    count = sum(bool(row["compiled"]) for row in table)
    return (
        [(f"ops inside of {count} compiled calls", "compiled code runs past the dispatcher")] if count else []
    )


def _compare_runs(
    model: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any], plain: Results, recorded: Results
) -> tuple[list[Check], list[tuple[str, str]]]:
    """The checks of outputs and gradients; where they fail a second plain run tells whose fault it is."""
    found = [
        checks.check_equal("outputs", plain.outputs, recorded.outputs),
        checks.check_equal("gradients", plain.gradients, recorded.gradients),
    ]
    unchecked = list(recorded.unchecked)
    if all(each.passed for each in found):
        return found, unchecked
    again = run_model(model, args, kwargs)
    if again.outputs == plain.outputs and again.gradients == plain.gradients:
        return found, unchecked
    why = "two unrecorded runs of this model differ as well"
    unchecked += [(each.name, why) for each in found if not each.passed]
    return [each for each in found if each.passed], unchecked
