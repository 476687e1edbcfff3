"""Finds backwards that go through the graphs of ever more earlier steps."""

from collections.abc import Iterator

import numpy as np

from ...recording.phase import BACKWARD, PHASES
from ...recording.suggestions import count_of
from ..tables.columns import ArrowTable, Column, build_table, column_of, find_rows, phase_codes, take
from ..tables.placement import name_module, read_modules
from ..tables.sampled_steps import SampledSteps
from .check import check
from .finding import CannotCheck, Finding
from .names import name_steps_of
from .needs import lacks_backwards
from .places import place_of_module

#: Fewer earlier steps are what truncated backpropagation goes through.
_FEW = 4

#: The smallest number of earlier calls that are known of a graph that no output leads to; at times it is twice that.
_KNOWN = 16

#: The number of last steps in most of which the number of earlier ones must have grown.
_LAST = 10


@check(
    "graph-over-steps",
    about="backwards that go through the graphs of ever more earlier steps",
    needs="backward times or ops",
)
def GRAPH_OVER_STEPS(run: SampledSteps, steps: float = _FEW) -> Iterator[Finding]:
    """Finds a hidden state that is not detached: each step costs more than the one before.

    Args:
        run: the recording.
        steps: the number of earlier steps from which on it is told; below, the number may stay as it is.
    """
    if not len(run.training):
        raise CannotCheck("no training step has ended")
    numbers = run.training[-len(run.numbers) :]
    backward = _read_backward(run, numbers)
    step, of_call, module = (column_of(backward, name) for name in ("step", "forward_step", "module_id"))
    counts = _count_earlier(numbers, step, of_call)
    last, reach = int(numbers[-1]), int(counts[-1])
    if reach < steps or not _grows(counts):
        return
    first = int(of_call[step == last].min())
    kept = np.unique(module[(step == last) & (of_call < last)]).tolist()
    modules = read_modules(run.data)
    names = [modules[one] for one in kept if one in modules]
    inner = max(names, key=lambda module: (module.path.count("."), bool(module.path)), default=None)
    where = "" if inner is None else f", as through {name_module(run.data, inner)}"
    yield Finding(
        severity="error",
        text=f"the backward of step {last} goes through calls of steps {first} to {last - 1}{where}",
        remedy="detach() what is carried from one step to the next (a hidden state, a running sum)",
        evidence=(
            f"that of step {int(numbers[0])} went through {count_of(int(counts[0]), 'earlier one')}: it grows"
            if reach > counts[0]
            else "they grow from step to step, and calls that are older are not known",
        ),
        rests_on=name_steps_of(run),
        **({} if inner is None else place_of_module(run, inner.module_id).fields()),
        step=last,
    )


def _grows(counts: Column) -> bool:
    """Returns whether the numbers of earlier steps still grow, but for calls that were forgotten in between.

    A window of steps that a loop keeps grows only until it is full.
    """
    more = np.diff(counts)
    is_kept = (more >= 0) | (counts[1:] >= _KNOWN)
    return bool(len(more) and is_kept.all() and np.mean(more[-_LAST:] > 0) > 0.5)


def _read_backward(run: SampledSteps, numbers: Column) -> ArrowTable:
    """Returns the backward calls of steps, with the step of the forward call of each."""
    calls = run.find("calls", ["step", "module_id", "phase", "forward_call_id"], step=numbers)
    is_backward = phase_codes(calls["phase"]) == PHASES.index(BACKWARD)
    if not is_backward.any():
        raise lacks_backwards(run)
    ids = column_of(calls, "forward_call_id")[is_backward]
    forwards = run.find("calls", ["call_id", "step"], call_id=np.unique(ids))
    at, step = find_rows(column_of(forwards, "call_id"), ids), column_of(calls, "step")[is_backward]
    of_call = np.where(at >= 0, take(column_of(forwards, "step"), at), step)
    module = column_of(calls, "module_id")[is_backward]
    return build_table({"step": step, "forward_step": of_call, "module_id": module})


def _count_earlier(numbers: Column, step: Column, of_call: Column) -> Column:
    """Returns for each step the number of earlier steps whose calls its gradients belong to."""
    earlier = np.unique(np.stack([step, of_call])[:, of_call < step], axis=1)[0]
    return np.array([np.count_nonzero(earlier == number) for number in numbers.tolist()])
