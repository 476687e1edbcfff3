"""Makes the rows of the `values` table for the measurements of ops in ended steps."""

from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from ...recording.phase import FORWARD, PHASE_CODE
from ..log.nesting import Ints
from ..steps.step import Step
from ..tensor_ids.tensor_ids import NO_OP
from ..values.measured import columns_of
from ..values.rows import ValuePart
from ..values.sites import SiteIds
from .call_costs import CallTable
from .leaves import Leaf
from .mode import SCHEMA
from .rows import OpRows
from .values import MeasuredOps


class OpSites(NamedTuple):
    """The locations of ops, one entry for each op; -1 where they are not known."""

    op_id: Ints  # ascending
    name: Sequence[str]
    nth: npt.NDArray[np.int32]  # of its name within the call
    phase: npt.NDArray[np.int8]
    call_id: Ints
    module_id: Ints
    call_nth: Ints


def read_values(
    steps: Iterable[Step], calls: CallTable | None, ops: OpRows, sites: SiteIds
) -> Iterator[ValuePart]:
    """Yields the rows of the measurements of the ops in each step."""
    where: OpSites | None = None
    for step in steps:
        for batch in step.ops:
            if batch.measured is not None:
                where = where or _op_sites(calls, ops)
                yield _read(batch.measured, batch.leaves, step.number or 0, where, sites)


def _op_sites(calls: CallTable | None, ops: OpRows) -> OpSites:
    """Returns where ops ran, for the rows of their measurements."""
    op_id = np.asarray(ops.tables["ops"]["op_id"])
    order = np.argsort(op_id, kind="stable")
    schema = ops.events[order, SCHEMA].tolist()
    call_id = ops.calls.call_id[order]
    module_id = nth = np.full(len(op_id), -1, np.int64)
    if calls is not None:
        rows = calls.rows_of(call_id)
        module_id = np.where(rows >= 0, calls.module_id[rows], -1)
        nth = np.where(rows >= 0, calls.nth[rows], -1)
    names = [ops.names[number] for number in schema]
    return OpSites(op_id[order], names, ops.nth[order], ops.calls.phase[order], call_id, module_id, nth)


def _read(
    measured: MeasuredOps, leaves: Sequence[Leaf], step: int, ops: OpSites, sites: SiteIds
) -> ValuePart:
    """Returns the rows of the outputs of ops, and of leaves.

    The row of a leaf names the op that read the leaf first, if there is one.
    """
    samples, op_ids, wheres, masks = columns_of(measured.sites, measured.width)
    op_id = np.array(op_ids, np.int64)
    at = np.where(op_id == NO_OP, len(ops.op_id), np.searchsorted(ops.op_id, op_id))
    phase = np.append(ops.phase, np.int8(PHASE_CODE[FORWARD]))[at]
    module_id, nth, call_id, nth_of_op = (
        np.append(column, -1)[at] for column in (ops.module_id, ops.call_nth, ops.call_id, ops.nth)
    )
    of_leaves = [row for row, where in enumerate(wheres) if type(where) is not str]
    by_number = {leaf.tensor_id: leaf for leaf in leaves}
    found = [by_number[wheres[row]] for row in of_leaves]
    for row in of_leaves:
        wheres[row] = ""  # no slot of an output
    names = map([*ops.name, ""].__getitem__, at.tolist())
    numbers = sites.names_of_outputs(wheres, names, nth_of_op.tolist())
    for row, leaf in zip(of_leaves, found, strict=True):
        [numbers[row]] = sites.names([(leaf.role, leaf.slot, None, -1)])
        module_id[row], nth[row] = -1 if leaf.owner is None else leaf.owner.module_id, -1
    return ValuePart(step, samples, numbers, np.array(masks, np.int64), phase, module_id, nth, call_id, op_id)
