"""Finds the micro-batches of a recording whose step is one batch in the other: their tensors are its parts."""

from dataclasses import dataclass, replace

import numpy as np

from ...recording.phase import FORWARD, OPTIMIZER, PHASES
from ...recording.role import INPUT, OUTPUT
from ..tables.columns import Column, Partners, Rows, number_codes, number_keys, rows_in_order, take
from .joins import JoinedRows, PartRows, join_rows, number_rows
from .modules import PlacePairs
from .sides import Side

_FORWARD = PHASES.index(FORWARD)


@dataclass(frozen=True)
class MicroBatches:
    """Several calls of a model in a step of one recording that are one call in the other."""

    count: int  # of each batch
    whole_in_a: bool
    models: tuple[int, int]  # its place in both


def find_micro_batches(a: Side, b: Side, places: PlacePairs, steps: Rows) -> MicroBatches | None:
    """Returns the micro-batches; None if both call their models as often in a step, or not on parts of one batch."""
    calls = a.calls
    outermost = calls.kept & (calls.calls.parent < 0) & (calls.calls.phase == _FORWARD) & (calls.place >= 0)
    for at in np.unique(calls.place[outermost]).tolist():
        there = int(places.partner[at])
        if there < 0:
            continue
        counts = _count_outermost(a, at, steps[:, 0]), _count_outermost(b, there, steps[:, 1])
        for whole_in_a, wholes, parts in ((False, counts[1], counts[0]), (True, counts[0], counts[1])):
            if not wholes.any() or wholes.sum() >= parts.sum():
                continue
            count = int(parts.sum() // wholes.sum())
            sides = ((b, there), (a, at)) if whole_in_a else ((a, at), (b, there))
            if (parts == wholes * count).all() and _are_parts(sides[0], sides[1], count):
                return MicroBatches(count, whole_in_a, (at, there))
    return None


def _count_outermost(side: Side, place: int, steps: Rows) -> Rows:
    calls = side.calls
    rows = calls.kept & (calls.place == place) & (calls.calls.parent < 0) & (calls.calls.phase == _FORWARD)
    found: Rows = np.searchsorted(np.sort(calls.step[rows]), np.stack([steps, steps + 1]))
    return np.asarray(found[1] - found[0], np.int64)


def _are_parts(side: tuple[Side, int], whole: tuple[Side, int], count: int) -> bool:
    """Returns whether what the first calls are given, or return, adds up to that of the first call of the whole."""
    for role in (INPUT, OUTPUT):
        parts, one = _find_batches(*side, role), _find_batches(*whole, role)
        if len(parts) >= count and len(one) and int(parts[:count].sum()) == int(one[0]):
            return True
    return False


def _find_batches(side: Side, place: int, role: str) -> Rows:
    """Returns the first dimensions of the first tensors of a role that each outermost call has, in order."""
    values = side.values
    kept = values.kept & (values.place == place) & values.is_of(role) & (values.call >= 0)
    rows = rows_in_order(kept, values.order)
    _, first = np.unique(values.call[rows], return_index=True)
    rows = rows[np.sort(first)]
    return values.sizes[rows, 0] if values.sizes.shape[1] else rows[:0]


@dataclass(frozen=True)
class Batched:
    """Which rows of one recording belong to micro-batches, or to the batch that has them as parts."""

    calls: Column
    ops: Column
    values: Column

    def leave_out(self, side: Side) -> Side:
        """Returns the recording without these ops and values."""
        ops = replace(side.ops, kept=side.ops.kept & ~self.ops)
        return replace(side, ops=ops, values=replace(side.values, kept=side.values.kept & ~self.values))


def find_batched(side: Side, place: int | None) -> Batched:
    """Returns the rows of a model that is called with micro-batches, and of what is done outside with its outputs."""
    calls, ops, values = side.calls, side.ops, side.values
    if place is None:
        return Batched(*(np.zeros(len(each.step), bool) for each in (calls, ops, values)))
    of_calls = np.asarray(calls.kept & (take(calls.place, calls.outermost) == place), bool)
    is_outside = (ops.call < 0) & (ops.phase != PHASES.index(OPTIMIZER))
    of_ops = np.asarray(is_outside | (take(of_calls, ops.call) > 0), bool)
    of_values = np.where(side.values.is_of_op, take(of_ops, values.op), take(of_calls, values.call)) > 0
    return Batched(of_calls, ops.kept & of_ops, values.kept & of_values)


def join_micro_batches(
    a: Side, b: Side, places: PlacePairs, step: Rows, found: MicroBatches, batched: tuple[Batched, Batched]
) -> JoinedRows:
    """Returns the tensors of micro-batches that are parts of those of the whole batch."""
    keys = _number_values(a, b, places, step, found)
    sides, batched = ((b, a), batched[::-1]) if found.whole_in_a else ((a, b), batched)
    keys = keys[::-1] if found.whole_in_a else keys
    parts, wholes = (
        np.flatnonzero(each.values & (side.values.call >= 0))
        for side, each in zip(sides, batched, strict=True)
    )
    part_calls = sides[0].values.call[parts]
    return join_rows(
        *sides,
        PartRows(
            parts,
            wholes,
            (keys[0][parts], keys[1][wholes]),
            sides[0].calls.outer[part_calls] % found.count,
            np.full(len(parts), found.count),
            np.zeros(len(parts), bool),
        ),
        whole_in_a=found.whole_in_a,
    )


def _number_values(a: Side, b: Side, places: PlacePairs, step: Rows, found: MicroBatches) -> Partners:
    """Returns a number of what each row was measured of, where micro-batches have that of their batch."""
    of_a, of_b = a.values, b.values
    outer = take(a.calls.outer, of_a.call), take(b.calls.outer, of_b.call)
    outer = (outer[0], outer[1] // found.count) if found.whole_in_a else (outer[0] // found.count, outer[1])
    op = number_codes((a.ops.names, take(a.ops.name, of_a.op)), (b.ops.names, take(b.ops.name, of_b.op)))
    return number_keys(
        number_rows(a, b, step, outer),
        (take(places.partner, of_a.place), of_b.place),
        (np.where(of_a.is_of_op, op[0], -1), np.where(of_b.is_of_op, op[1], -1)),
        (
            np.where(of_a.is_of_op, take(a.ops.nth, of_a.op), -1),
            np.where(of_b.is_of_op, take(b.ops.nth, of_b.op), -1),
        ),
    )
