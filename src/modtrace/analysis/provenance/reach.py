"""Decides which NaN and infinite values of a step came to something that matters: a loss, a gradient, a parameter."""

from collections.abc import Iterable
from dataclasses import dataclass, field

import numpy as np

from ...recording.phase import BACKWARD, OPTIMIZER, PHASES
from ...recording.protocols import RecordingData
from ...recording.role import BUFFER, LOSS, OPTIMIZER_STATE, OUTPUT, PARAMETER, PARAMETER_GRAD, UPDATE
from ..tables.calls import outermost_calls, phases_of
from ..tables.columns import Column, column_of
from .indexed_tables import IndexedTables
from .step_flow import tell_place
from .trace import End, Origin, Trace

#: The roles of tensors that must be finite wherever they are.
_MUST_BE_FINITE = (PARAMETER, PARAMETER_GRAD, OPTIMIZER_STATE, UPDATE, LOSS)

_COLUMNS = ("site_id", "call_id", "count", "nan_count", "inf_count", "max")
_OPTIMIZER = PHASES.index(OPTIMIZER)


def are_ends_finite(
    tables: IndexedTables,
    data: RecordingData,
    losses: Iterable[bool | None] = (),
    *,
    returns_meant: bool = False,
) -> bool | None:
    """Returns whether all was finite that the values of a step can come to; None if too little of that was measured.

    That are losses, parameters, their gradients, updates and optimizer states, NaN in buffers, and what the outermost
    calls returned: of that -inf alone may be the logarithm of a probability. In a step with a backward the gradients
    decide, in one without what was returned.

    Args:
        tables: all of the recording.
        data: the rows of the step.
        losses: of each backward whether the tensor at which it began was not finite; None where that is not known.
        returns_meant: see `Trace`.
    """
    values = data.table("values").select(_COLUMNS)
    site_id = column_of(values, "site_id")

    def is_of(*roles: str) -> Column:
        return np.isin(site_id, tables.sites_of(*roles))

    nan, inf = column_of(values, "nan_count") > 0, column_of(values, "inf_count") > 0
    infinite = inf & (column_of(values, "max") == np.inf)
    is_returned = is_of(OUTPUT) & np.isin(column_of(values, "call_id"), outermost_calls(data.table("calls")))
    bad_buffers = is_of(BUFFER) & nan
    is_bad = (
        (is_of(*_MUST_BE_FINITE) & (nan | inf))
        | (bad_buffers & ~np.isin(site_id, _held_from_the_beginning(tables, site_id[bad_buffers])))
        | (is_returned & (nan | (infinite & (not returns_meant))))
    )
    if is_bad.any() or any(losses):
        return False
    decides = is_of(PARAMETER_GRAD) if BACKWARD in phases_of(data) else is_returned
    return True if (decides & (column_of(values, "count") >= 0)).any() else None


def _held_from_the_beginning(tables: IndexedTables, buffers: Column) -> Column:
    """Returns those of some sites at which the first tensor that was measured held NaN."""
    rows = tables.find("values", ["site_id", "nan_count"], site_id=np.unique(buffers))
    sites, first = np.unique(column_of(rows, "site_id"), return_index=True)
    held: Column = sites[column_of(rows, "nan_count")[first] > 0]
    return held


#: Where an event is, in any step.
EventPlace = tuple[object, ...]


@dataclass(frozen=True)
class Innocent:
    """What is known from the steps before."""

    steps: set[bytes] = field(default_factory=set)  # keys of steps in which nothing came to anything
    places: set[EventPlace] = field(default_factory=set)  # of values that came to nothing


def select_guilty(trace: Trace, are_finite: bool | None, innocent: Innocent) -> list[Origin]:
    """Returns the events whose values came to something that matters, or may have, in the order of the ops.

    Args:
        trace: the events of the step.
        are_finite: what `are_ends_finite` says of it.
        innocent: the places of the other events are added to it.
    """
    names = trace.flow.bare_names
    ends = [end for end in trace.ends if end.is_returned] if are_finite else trace.ends
    came = _came(trace, ends, innocent.places)
    suspects = dict.fromkeys(event for event in trace.events if not event.is_guarded(names))
    guilty = [
        event
        for number, event in enumerate(trace.events)
        if number in came or (_is_of_optimizer(trace, event) and event in suspects)
    ]
    if not guilty and not are_finite:
        return [event for event in suspects if not event.masks]
    told = set(guilty)
    innocent.places.update(_place_of(trace, event) for event in trace.events if event not in told)
    return guilty


def _place_of(trace: Trace, event: Origin) -> EventPlace:
    flow, ops = trace.flow, trace.flow.ops
    where = tell_place(ops.placed, int(ops.call[event.op]), int(ops.where[event.op]))
    return (*where.values(), flow.name_op(event.op), int(ops.nth[event.op]), event.slot)


def _came(trace: Trace, ends: Iterable[End], absorbed: set[EventPlace]) -> set[int]:
    """Returns the numbers of the events that are not finite at an end, and of those whose derivatives are.

    Of several at one end, those at places whose values came to nothing in other steps are not among them.
    """
    came: set[int] = set()
    names = trace.flow.bare_names
    for end in ends:
        masks = {number for number in end.origins if trace.events[number].is_mask(names)}
        others = end.origins - masks
        new = {each for each in others if _place_of(trace, trace.events[each]) not in absorbed}
        came |= new or others or (set() if end.is_returned else masks)
    by_op = {int(trace.flow.ops.op_id[event.op]): number for number, event in enumerate(trace.events)}
    forwards = {by_op.get(trace.flow.forward_op[trace.events[number].op] or -1) for number in came}
    return came | {
        number for number in forwards if number is not None and not trace.events[number].is_guarded(names)
    }


def _is_of_optimizer(trace: Trace, event: Origin) -> bool:
    """Returns whether an optimizer made values and left them."""
    return trace.flow.ops.phase[event.op] == _OPTIMIZER and bool(event.unread)
