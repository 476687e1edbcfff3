"""Finds the output that first differs on ranks of tensor parallelism which had equal numbers before."""

from collections import defaultdict
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from ...recording.arrow.arrays import to_numpy
from ...recording.phase import FORWARD, PHASES
from ...recording.role import OUTPUT, PARAMETER
from ...recording.statistics.moments import RAW
from ..tables.columns import Column, Rows, bits_of, dictionary_codes, find_rows, mix_columns
from ..tables.rank_values import RankValues
from ..tables.tensors import read_sizes


class SplitOutput(NamedTuple):
    """An output of a module without parameters, such as a dropout, that differs on ranks."""

    rank: RankValues  # the lowest rank that has it
    row: int  # in its table
    others: tuple[int, ...]  # the ranks with other numbers


def find_split_output(ranks: Sequence[RankValues]) -> SplitOutput | None:
    """Returns the first output on which ranks of tensor parallelism part; None if there is none.

    Such ranks have equal activations but between a layer that is split by columns, whose output has the features of
    the rank alone, and one that is split by rows. Elsewhere a module without parameters has to return the same on all
    ranks whose activations of that shape were equal just before: a dropout has to draw one mask. Ranks with other parts
    of the batch, or of the sequence, never have equal activations.
    """
    found: list[tuple[int, int, SplitOutput]] = []
    covered: set[int] = set()
    for number, rank in enumerate(ranks):
        if number not in covered:
            kinds = _find_kinds(rank)
            if kinds:
                found += _search(ranks, number, kinds, covered)
    return min(found, key=lambda one: one[:2])[2] if found else None


_WHOLE, _COLUMNS, _ROWS, _OTHER = range(4)


def _find_kinds(rank: RankValues) -> dict[int, int]:
    """Returns how each module with parameters is split, by its id; nothing if none is split by rows."""
    placed = rank.placed
    rows = np.flatnonzero(placed.is_of(PARAMETER))
    rows = rows[np.unique(placed.site[rows], return_index=True)[1]]
    placement, texts = dictionary_codes(placed.table["placements"])
    found: dict[int, int] = {}
    for row in rows.tolist():
        text = texts[placement[row]] if placement[row] >= 0 else ""
        if len(placed.table["shape"][row]) > 1:
            kind = _ROWS if "S(1)" in text else _COLUMNS if "S(0)" in text else _OTHER
            found[int(placed.module[row])] = kind
        else:
            found.setdefault(int(placed.module[row]), _OTHER)
    return found if _ROWS in found.values() else {}


def _search(
    ranks: Sequence[RankValues], number: int, kinds: dict[int, int], covered: set[int]
) -> list[tuple[int, int, SplitOutput]]:
    """Searches the outputs of one rank; `covered` is given the ranks that have any of them."""
    base = ranks[number]
    placed = base.placed
    modules = placed.data.table("modules").select(["module_id", "parent_id"]).to_pylist()
    above = np.array([row["parent_id"] for row in modules if row["parent_id"] is not None], np.int64)
    is_output = (
        placed.is_of(OUTPUT) & (placed.phase == PHASES.index(FORWARD)) & ~np.isin(placed.module, above)
    )
    rows = np.flatnonzero(is_output)
    rows = rows[np.lexsort((placed.moment[rows], placed.step[rows]))]
    kind = np.array([kinds.get(module, _WHOLE) for module in placed.module[rows].tolist()], np.int64)
    is_known = to_numpy(placed.table["count"].is_valid())[rows] & (placed.numel[rows] > 1)
    is_known &= ~to_numpy(placed.table["global_shape"].is_valid())[rows]
    marks = np.maximum.accumulate(np.where((kind == _COLUMNS) | (kind == _ROWS), np.arange(len(rows)), 0))
    is_inside = kind[marks] == _COLUMNS if len(rows) else np.zeros(0, bool)
    stream = np.flatnonzero(is_known & ~is_inside)
    rows, kind = rows[stream], kind[stream]
    identity = _identify(base, rows)
    before = _find_before(mix_columns(np.stack([placed.step[rows], _number_shapes(base)[rows]], axis=1)))
    found = []
    others: dict[int, list[int]] = defaultdict(list)
    for other_number, other in enumerate(ranks):
        if other_number == number:
            continue
        at = find_rows(other.key, base.key[rows])
        is_equal = (at >= 0) & (identity == _identify(other, at)).all(axis=1)
        if is_equal.any():
            covered.add(other_number)
        is_split = (at >= 0) & ~is_equal & (kind == _WHOLE) & (before >= 0) & is_equal[before]
        if is_split.any():
            others[int(np.flatnonzero(is_split)[0])].append(other.rank)
    for row, different in others.items():
        split = SplitOutput(base, int(rows[row]), tuple(different))
        found.append((int(placed.step[rows[row]]), int(placed.moment[rows[row]]), split))
    return found


def _identify(rank: RankValues, rows: Rows) -> Column:
    table = rank.placed.table
    return bits_of(table, RAW)[rows] if len(table) else np.zeros((len(rows), len(RAW)), np.int64)


def _number_shapes(rank: RankValues) -> Rows:
    return mix_columns(read_sizes(rank.placed.table["shape"]))


def _find_before(keys: Rows) -> Rows:
    """Returns for each row the last one before it with the same key; -1 for none."""
    order = np.argsort(keys, kind="stable")
    before = np.full(len(keys), -1, np.int64)
    is_same = keys[order][1:] == keys[order][:-1]
    before[order[1:][is_same]] = order[:-1][is_same]
    return before
