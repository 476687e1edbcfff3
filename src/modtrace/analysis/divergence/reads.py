"""Compares what paired ops read, argument by argument, whichever tensors are pairs."""

import numpy as np

from ...recording.role import OP_OUTPUT
from ...recording.statistics.moments import Numbers
from ..alignment.keys import number_codes
from ..alignment.sides import Side
from ..alignment.sizes import number_sizes, read_sizes
from ..step.calls import Bools, RowFinder, Rows, take
from .errors import find_errors
from .measured import read_measured
from .ranking import IS_MADE

#: So many views in a row are looked through.
_MOST_VIEWS = 4

#: What is so many times as far below 0 as the largest number is apart from it is a mask.
_MASKED = 1e3

#: So many arguments are compared, the first ones.
_MOST_READS = 10_000


def compare_reads(
    one: tuple[Side, Rows], other: tuple[Side, Rows], partner: Rows, differ: Bools, noise: Numbers
) -> tuple[Numbers, Numbers]:
    """Returns how far apart what the same ops read is, where two tensors are equal up to noise that are no pair.

    Ops that only one recording has, or that are called alike, may lie between: all in front of it has come to the same
    then, however far apart what they returned is.

    Args:
        one: a recording, and its rows of `values` of each pair.
        other: the same of the other one.
        partner: of each op of the first: the same op of the second; -1 for none.
        differ: which pairs are apart by more than noise; only the ops that returned these are looked at.
        noise: up to which each pair is apart by rounding.

    Returns:
        The error of each read of the first recording, and of the second; NaN where such tensors are not known.
    """
    (side, rows), (side_b, rows_b) = one, other
    found, found_b = (np.full(len(each.flow.read), np.nan) for each in (side, side_b))
    asked = np.flatnonzero(differ & side.values.is_of(OP_OUTPUT, rows=rows) & (side.values.op[rows] >= 0))
    wanted = np.full(len(partner), -1, np.int64)
    wanted[side.values.op[rows[asked]]] = partner[side.values.op[rows[asked]]]
    reads, reads_b = pair_reads(side, side_b, wanted)
    if not len(reads):
        return found, found_b
    row, row_b = _find_rows(side, reads), _find_rows(side_b, reads_b)
    of_pair = np.full(len(side.values.step), -1, np.int64)
    of_pair[rows] = rows_b
    shape, shape_b = number_sizes(*(read_sizes(each.flow.tensors.table["shape"]) for each in (side, side_b)))
    fits = (row >= 0) & (row_b >= 0) & (take(of_pair, row) != row_b)
    fits &= shape[side.flow.read[reads]] == shape_b[side_b.flow.read[reads_b]]
    at = np.flatnonzero(fits)[:_MOST_READS]
    a, b = read_measured(side.data, row[at]), read_measured(side_b.data, row_b[at])
    is_masked = -np.fmin(a.stats.min, b.stats.min) > _MASKED * np.fmax(
        np.abs(a.stats.max), np.abs(b.stats.max)
    )
    kept = (a.numel == b.numel) & ~is_masked  # a mask of large negative numbers hides the others
    at, error = at[kept], find_errors(a, b).error[kept]
    of_op = np.zeros(len(partner))
    np.maximum.at(of_op, side.values.op[rows[asked]], noise[asked])
    error[error > IS_MADE * of_op[side.flow.reader[reads[at]]]] = np.nan
    found[reads[at]], found_b[reads_b[at]] = error, error
    return found, found_b


def pair_reads(side: Side, side_b: Side, partner: Rows) -> tuple[Rows, Rows]:
    """Returns the reads of two recordings by ops that are partners, as the same argument."""
    slots = number_codes((side.flow.slots, side.flow.slot), (side_b.flow.slots, side_b.flow.slot))
    width = 1 + max(int(each.max(initial=0)) for each in slots)
    reads = np.flatnonzero(partner[side.flow.reader] >= 0)
    there = RowFinder(side_b.flow.reader * width + slots[1])(
        partner[side.flow.reader[reads]] * width + slots[0][reads]
    )
    return reads[there >= 0], there[there >= 0]


def find_origins(side: Side) -> Rows:
    """Returns of each read the tensor that is read, or of which that is a view or a copy."""
    flow, is_plain = side.flow, np.append(side.ops.is_plain, False)
    first_read = np.full(len(side.ops.name), -1, np.int64)
    first_read[flow.reader[::-1]] = flow.read[::-1]
    tensor = flow.read
    for _ in range(_MOST_VIEWS):
        maker = flow.tensors.producer[tensor]
        is_view = (maker >= 0) & is_plain[maker] & (take(first_read, maker) >= 0)
        tensor = np.where(is_view, take(first_read, maker), tensor)
    return tensor


def _find_rows(side: Side, reads: Rows) -> Rows:
    """Returns the row of `values` of what an op has returned that is read; -1 for none."""
    outputs = np.flatnonzero(side.values.is_of(OP_OUTPUT) & (side.values.op >= 0))
    tensor = side.find_tensors(outputs)
    of_tensor = np.full(len(side.flow.tensors), -1, np.int64)
    of_tensor[tensor[tensor >= 0]] = outputs[tensor >= 0]
    return of_tensor[find_origins(side)[reads]]
