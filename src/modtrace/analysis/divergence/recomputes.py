"""Compares recomputes with their forwards, and merges these pairs with those of the two recordings."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from ...recording.statistics.moments import Numbers
from ..tables.columns import Column, Rows, columns_at
from ..tables.placement import ModuleName
from ..tables.run import RunTables
from .answer import FIRST
from .errors import find_errors
from .noise import assume_noise, find_cancellation, give_noise
from .pair_inputs import PairInputs, find_inputs, order_by_use
from .paired_run import PairedRun, is_uninitialized
from .pairs import ComparedPairs
from .ranking import rank


def compare_recomputed(
    tables: RunTables,
    pairs: Rows,
    recompute_of: str,
    modules: Mapping[ModuleName, ModuleName],
    tolerance: float | None,
) -> tuple[ComparedPairs, Numbers]:
    """Returns the compared recomputes, and for every row of `values` the error that results from recomputing.

    Args:
        tables: the tables of the recording.
        pairs: (n, 2): rows of `values` of a recompute and of its forward.
        recompute_of: FIRST or SECOND, the name of the recording.
        modules: the names by which modules are shown; a module that is missing here keeps its own.
        tolerance: the relative error that counts as noise; None to assume rounding.
    """
    pairs = pairs[~is_uninitialized(tables, pairs[:, 0])]
    pairs = pairs[order_by_use(tables, pairs[:, 0])]
    rows, forward = pairs.T
    no_op = np.zeros(len(tables.ops.name) + 1, bool)
    names = tuple(modules.get(name, name) for name in tables.names)
    run = PairedRun(tables=replace(tables, names=names), rows=rows, is_unpaired=no_op)
    run_b = PairedRun(tables=tables, rows=forward, is_unpaired=no_op)
    errors = find_errors(run_b.measured, run.measured)
    all_rows = order_by_use(tables, np.arange(len(tables.values.step)))
    of_row = np.zeros(len(all_rows))  # other tensors were not recomputed, so this error is 0
    of_row[rows] = errors.error
    inputs = find_inputs(PairedRun(tables=tables, rows=all_rows, is_unpaired=no_op), of_row[all_rows])
    recompute_error = np.empty(len(all_rows))
    recompute_error[all_rows] = inputs.error
    inputs = PairInputs(**columns_at(inputs, np.argsort(all_rows)[rows]))
    inputs.through[:] = -1
    if tolerance is None:
        noise = assume_noise(run_b.measured, run.measured, find_cancellation(run))
    else:
        noise = give_noise(tolerance, len(rows))
    return ComparedPairs(
        a=run,
        b=run_b,
        modules={},
        partner=np.full(len(tables.ops.name), -1, np.int64),
        errors=errors,
        inputs=inputs,
        noise=noise,
        ranking=rank(errors, inputs, noise, np.ones(len(rows), bool)),
        resized=pairs[:0],
        other_mesh=False,
        recompute_of=recompute_of,
    ), recompute_error


@dataclass(frozen=True, kw_only=True, eq=False)
class MergedPairs:
    """The pairs of all parts in the order of use."""

    parts: Sequence[ComparedPairs]  # the pairs of the two recordings, then those of recomputes
    order: Rows  # the order of use, for the pairs of all parts one after the other

    def collect(self, columns: Sequence[Column]) -> Column:
        """Returns a column of all pairs, merged from the column of each part."""
        return np.concatenate(columns)[self.order]

    def locate(self, pair: int) -> tuple[int, int]:
        """Returns the index of the part that a pair belongs to, and the pair's position in that part."""
        position = int(self.order[pair])
        begins = np.cumsum([0, *(len(part.errors) for part in self.parts)])
        number = int(np.searchsorted(begins, position, side="right")) - 1
        return number, position - int(begins[number])


def merge_pairs(parts: Sequence[ComparedPairs]) -> MergedPairs:
    """Returns the pairs of all parts, of the usual ones and of recomputed tensors, in one order.

    A recomputed tensor stands before the tensor that an op of the same recording read or made next.
    """
    pairs, *recomputes = parts
    positions = [np.arange(len(pairs.errors)), *(_find_next(pairs, part) for part in recomputes)]
    number = np.repeat(np.arange(len(parts)), [len(of_part) for of_part in positions])
    return MergedPairs(parts=parts, order=np.lexsort((-number, np.concatenate(positions))))


def _find_next(pairs: ComparedPairs, recomputed: ComparedPairs) -> Rows:
    """Returns for each recomputed tensor the pair that its recording used next."""
    rows = (pairs.a if recomputed.recompute_of == FIRST else pairs.b).rows
    order = order_by_use(recomputed.b.tables, np.concatenate([rows, recomputed.a.rows]))
    is_pair = order < len(rows)
    behind = np.append(order[is_pair], len(rows))
    following = np.empty(len(order), np.int64)
    following[order] = behind[np.cumsum(is_pair)]
    return following[len(rows) :]
