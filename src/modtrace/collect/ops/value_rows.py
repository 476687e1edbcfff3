"""Makes the rows of the `values` table for the measurements of ops in ended steps."""

from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from ...measure.dtypes import format_of
from ...measure.measurers.measurer import Measurement
from ...recording.phase import FORWARD, PHASE_CODE
from ..log.nesting import Ints
from ..steps.step import Step
from ..tensor_ids.tensor_ids import NO_OP, Geometry
from ..values.measured import PlainRows, columns_of
from ..values.rows import ValuePart
from ..values.sites import NumberedKeys, SiteIds
from .call_costs import CallTable
from .leaves import Leaf
from .mode import SCHEMA
from .rows import OpRows
from .values import MeasuredOps


class OpSites(NamedTuple):
    """The locations of ops, one entry for each op; -1 where they are not known."""

    op_id: Ints  # ascending
    schema: Ints  # the numbers of their names
    nth: npt.NDArray[np.int32]  # of its name within the call
    phase: npt.NDArray[np.int8]
    call_id: Ints
    module_id: Ints
    call_nth: Ints
    names: Sequence[str]  # by number of schema


def read_values(
    steps: Iterable[Step], calls: CallTable | None, ops: OpRows, sites: SiteIds
) -> Iterator[ValuePart]:
    """Yields the rows of the measurements of the ops in each step."""
    where: OpSites | None = None
    for step in steps:
        found = [(batch.measured, batch.leaves) for batch in step.ops if batch.measured is not None]
        if found:
            where = where or _op_sites(calls, ops)
            for measured, leaves in found:
                yield _read_sites(measured, leaves, step.number or 0, where, sites)
            yield _read_numbers([measured for measured, _ in found], step.number or 0, where, sites)


def _op_sites(calls: CallTable | None, ops: OpRows) -> OpSites:
    """Returns where ops ran, for the rows of their measurements."""
    op_id = np.asarray(ops.tables["ops"]["op_id"])
    order = np.argsort(op_id, kind="stable")
    call_id = ops.calls.call_id[order]
    module_id = nth = np.full(len(op_id), -1, np.int64)
    if calls is not None:
        rows = calls.rows_of(call_id)
        module_id = np.where(rows >= 0, calls.module_id[rows], -1)
        nth = np.where(rows >= 0, calls.nth[rows], -1)
    nth_of_op, phase, schema = ops.nth[order], ops.calls.phase[order], ops.events[order, SCHEMA]
    return OpSites(op_id[order], schema, nth_of_op, phase, call_id, module_id, nth, ops.names)


def _read_sites(
    measured: MeasuredOps, leaves: Sequence[Leaf], step: int, ops: OpSites, sites: SiteIds
) -> ValuePart:
    """Returns the rows of the outputs of ops, and of leaves.

    The row of a leaf names the op that read the leaf first, if there is one.
    """
    samples, op_ids, wheres, masks = columns_of(measured.sites, measured.width)
    of_leaves = [row for row, where in enumerate(wheres) if type(where) is not str]
    by_number = {leaf.tensor_id: leaf for leaf in leaves}
    found = [by_number[wheres[row]] for row in of_leaves]
    for row in of_leaves:
        wheres[row] = ""  # no slot of an output
    slots = NumberedKeys()
    part = _part(
        step, samples, np.array(op_ids, np.int64), masks, slots.of(wheres), slots.keys_by_number, ops, sites
    )
    for row, leaf in zip(of_leaves, found, strict=True):
        [part.named[row]] = sites.names([(leaf.role, leaf.slot, None, -1)])
        part.module_id[row], part.nth[row] = -1 if leaf.owner is None else leaf.owner.module_id, -1
    return part


def _read_numbers(measured: Sequence[MeasuredOps], step: int, ops: OpSites, sites: SiteIds) -> ValuePart:
    """Returns the rows of the outputs that the mode has measured itself."""
    numbers = np.concatenate([of_batch.numbers for of_batch in measured])
    row, op_id, mask, slot, geometry, start_ns, _ = numbers.T
    ids = measured[0].ids  # those of the mode, as its rows
    used, kind = np.unique(geometry, return_inverse=True)
    kinds = [_kind_of(ids.geometries[number]) for number in used.tolist()]
    samples = PlainRows(measured[0].rows, row, start_ns, kind, kinds)
    return _part(step, samples, op_id, mask, slot, ids.slots, ops, sites)


def _kind_of(geometry: Geometry) -> tuple[Any, ...]:
    form = None if geometry.dtype is None else format_of(geometry.dtype)
    return geometry.shape, geometry.dtype, None if form is None else form.note, None, None


def _part(
    step: int,
    samples: Sequence[Measurement] | PlainRows,
    op_id: Ints,
    masks: Any,
    slot: Ints,
    slots: Sequence[str],
    ops: OpSites,
    sites: SiteIds,
) -> ValuePart:
    """Returns rows with what is known of their ops; `slots` are the texts of the numbers in `slot`."""
    at = np.where(op_id == NO_OP, len(ops.op_id), np.searchsorted(ops.op_id, op_id))
    phase = np.append(ops.phase, np.int8(PHASE_CODE[FORWARD]))[at]
    module_id, nth, call_id, nth_of_op, schema = (
        np.append(column, -1)[at]
        for column in (ops.module_id, ops.call_nth, ops.call_id, ops.nth, ops.schema)
    )
    names = [*ops.names, ""]  # by number of schema; -1: there is no op
    # A name is looked up once, and not once for each row: 0.5 us.
    sizes = len(slots), len(names), int(nth_of_op.max(initial=-1)) + 2
    keys = np.ravel_multi_index((slot, schema % len(names), nth_of_op + 1), sizes)
    used, name_of_row = np.unique(keys, return_inverse=True)
    of_slot, of_op, nths = (column.tolist() for column in np.unravel_index(used, sizes))
    named = sites.names_of_outputs(
        map(slots.__getitem__, of_slot), map(names.__getitem__, of_op), (at - 1 for at in nths)
    )
    masks = np.array(masks, np.int64)
    return ValuePart(step, samples, named[name_of_row], masks, phase, module_id, nth, call_id, op_id)
