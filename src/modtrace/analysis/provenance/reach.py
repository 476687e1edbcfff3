"""Decides which NaN and infinite values of a step matter, because a loss, a gradient or a parameter depends on them."""

from collections.abc import Iterable
from dataclasses import dataclass, field

import numpy as np

from ...recording.phase import BACKWARD, OPTIMIZER, PHASES
from ...recording.role import BUFFER, LOSS, OPTIMIZER_STATE, OUTPUT, PARAMETER, PARAMETER_GRAD, UPDATE
from ..tables.calls import outermost_calls, phases_of
from ..tables.columns import Bools, column_of
from ..tables.one_step import OneStep
from .memory import Events, list_events, set_of_events
from .traced import End, Origin, Trace

#: The roles of tensors that must be finite at every site.
_MUST_BE_FINITE = (PARAMETER, PARAMETER_GRAD, OPTIMIZER_STATE, UPDATE, LOSS)

_COLUMNS = ("site_id", "call_id", "count", "nan_count", "inf_count", "max")
_BACKWARD, _OPTIMIZER = PHASES.index(BACKWARD), PHASES.index(OPTIMIZER)


def are_ends_finite(
    step: OneStep, losses: Iterable[bool | None] = (), *, returns_meant: bool = False
) -> bool | None:
    """Returns whether all tensors that matter in a step are finite; None if too few of them were measured.

    These tensors are losses, parameters, their gradients, updates and optimizer states, buffers (for NaN only), and
    outputs of outermost calls, in which -inf may be the logarithm of a probability. In a step with a backward the
    gradients decide, in one without it the outputs.

    Args:
        step: the rows of the step.
        losses: for each backward, whether its loss was not finite; None where that is not known.
        returns_meant: whether the outermost calls returned intended infinities; see `Trace`.
    """
    values = step.table("values").select(_COLUMNS)
    nan, inf = column_of(values, "nan_count") > 0, column_of(values, "inf_count") > 0
    infinite = inf & (column_of(values, "max") == np.inf)
    outermost = outermost_calls(step.table("calls"))
    is_returned = step.is_of(OUTPUT) & np.isin(column_of(values, "call_id"), outermost)
    is_bad = (
        (step.is_of(*_MUST_BE_FINITE) & (nan | inf))
        | _find_spoiled_buffers(step, nan)
        | (is_returned & (nan | (infinite & (not returns_meant))))
    )
    if is_bad.any() or any(losses):
        return False
    decides = step.is_of(PARAMETER_GRAD) if BACKWARD in phases_of(step) else is_returned
    return True if (decides & (column_of(values, "count") >= 0)).any() else None


def _find_spoiled_buffers(step: OneStep, nan: Bools) -> Bools:
    """Returns which rows are of buffers that hold NaN, and did not when they were first measured."""
    site_id = column_of(step.table("values"), "site_id")
    is_bad = step.is_of(BUFFER) & nan
    rows = step.run.find("values", ["site_id", "nan_count"], site_id=np.unique(site_id[is_bad]))
    sites, first = np.unique(column_of(rows, "site_id"), return_index=True)
    return np.asarray(is_bad & ~np.isin(site_id, sites[column_of(rows, "nan_count")[first] > 0]))


#: Identifies the op and slot of an event, independently of the step.
EventPlace = tuple[object, ...]


@dataclass(frozen=True)
class Innocent:
    """Knowledge from earlier steps about values that did not matter."""

    steps: set[bytes] = field(default_factory=set)  # keys of steps in which no values mattered
    places: set[EventPlace] = field(default_factory=set)  # the places of events whose values did not matter


def select_guilty(trace: Trace, are_finite: bool | None, innocent: Innocent) -> list[Origin]:
    """Returns the events whose values matter, or may matter, in the order of the ops.

    Args:
        trace: the trace with the events of the step.
        are_finite: the result of `are_ends_finite` for the step.
        innocent: the record to which the places of all other events are added.
    """
    ends = [end for end in trace.ends if end.is_returned] if are_finite else trace.ends
    guilty = _came(trace, ends, innocent.places) | (_of_optimizer(trace) & trace.unread & ~trace.guarded)
    if not guilty and not are_finite:
        return [event for event in trace.select(~trace.guarded) if not event.masks]
    innocent.places.update(_place_of(trace, event) for event in trace.select(~guilty))
    return trace.select(guilty)


def _place_of(trace: Trace, event: Origin) -> EventPlace:
    step = trace.step
    where = step.locate_op(event.op).values()
    return (*where, step.name_op(event.op), int(step.ops.nth[event.op]), event.slot)


def _came(trace: Trace, ends: Iterable[End], absorbed: set[EventPlace]) -> Events:
    """Returns the events that reach an end, or else forward events whose derivatives do.

    If several reach one end, those at places whose values did not matter in other steps are left out. Where values of
    another forward op reached a loss or gradients, one that was absorbed is not to blame for an overflow of its own
    derivative beside them: the derivative stands for itself.
    """
    names, events = trace.step.bare_names, trace.events
    masks = set_of_events(event.is_mask(names) for event in events)
    known = set_of_events(_place_of(trace, event) in absorbed for event in events) if absorbed else 0
    came: Events = 0
    reached: Events = 0  # a loss or gradients
    for end in ends:
        others = end.events & ~masks
        of_end = (others & ~known) or others or (0 if end.is_returned else end.events)
        came, reached = came | of_end, reached if end.is_returned else reached | of_end
    phases = {int(trace.step.ops.phase[events[number].op]) for number in list_events(reached)}
    if phases - {_BACKWARD, _OPTIMIZER}:
        return came
    numbers = {int(trace.step.ops.op_id[event.op]): number for number, event in enumerate(events)}
    forwards = {numbers.get(int(trace.step.forward_op[events[number].op])) for number in list_events(came)}
    return came | (set_of_events(number in forwards for number in range(len(events))) & ~trace.guarded)


def _of_optimizer(trace: Trace) -> Events:
    """Returns the events at ops of an optimizer."""
    return set_of_events(trace.step.ops.phase[event.op] == _OPTIMIZER for event in trace.events)
