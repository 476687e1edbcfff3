"""Checks that ranks agree on what each of them has a copy of: parameters, reduced gradients, optimizer states."""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ...recording.arrow.arrays import to_numpy
from ...recording.module_path import join
from ...recording.phase import BACKWARD, PHASES
from ...recording.protocols import RecordingData
from ...recording.role import OPTIMIZER_STATE, PARAMETER, PARAMETER_GRAD, UPDATE
from ..tables.columns import Column, Rows, find_rows
from ..tables.ranks import RankValues, bits_of, find_unread, number_blocks, read_rank_values
from ..tables.sites import read_sites

#: The roles of tensors of which ranks have copies. A buffer may be a rank's own, as the statistics of BatchNorm are.
_COPIED = (PARAMETER, PARAMETER_GRAD, OPTIMIZER_STATE, UPDATE)

#: Statistics of which at least one differs where tensors do, but for a rare chance.
_STATISTICS = (
    "count",
    "min",
    "max",
    "sum",
    "sumsq",
    "nan_count",
    "inf_count",
    "sumabs",
    "sum4",
    "zero_count",
)


@dataclass(frozen=True, kw_only=True)
class Disagreement:
    """A tensor of which ranks have other numbers than others, although each has a copy of it."""

    step: int
    role: str
    path: str  # of the module; "" for a root, and for a parameter that no module owns
    slot: str  # the name of the parameter or buffer in the module
    #: The ranks with equal numbers, in groups: the largest first, of equally large ones that with the lowest rank.
    groups: tuple[tuple[int, ...], ...]
    factor: float  # the norm of the tensor on the first rank of the second group over that of the first group

    @property
    def name(self) -> str:
        """The full path of the parameter or buffer: `head.weight`."""
        return join(self.path, self.slot)

    @property
    def alone(self) -> int | None:
        """The only rank that disagrees with all others, which agree; None if it cannot be told."""
        is_told = len(self.groups) == 2 and len(self.groups[1]) == 1 and len(self.groups[0]) > 1
        return self.groups[1][0] if is_told else None


@dataclass(frozen=True, kw_only=True)
class ReplicaCheck:
    """Which copies of ranks were compared, and which differ."""

    compared: int  # how many tensors of which at least two ranks have a row
    by_hash: int  # how many of them by hashes; the others by all statistics
    #: The tensors that disagree in the first step in which any does, in the order in which they were measured.
    first: tuple[Disagreement, ...]
    disagreeing_steps: tuple[int, ...]  # the steps in which any tensor disagrees


def check_replicas(ranks: Sequence[tuple[int, RecordingData]]) -> ReplicaCheck:
    """Compares the tensors of which several ranks have a copy, bit by bit, by their hashes or by all statistics.

    Of DTensors the parts at one place are copies. Other parameters, their gradients when the optimizer uses them, and
    its states have one value on all ranks that train one model. Partial sums are left out.
    """
    values = read_rank_values(ranks)
    lowest = max(values, key=lambda rank: len(rank.key))  # a rank that died has fewer rows
    numbers, hashed = zip(*(_read_identity(rank, lowest.key) for rank in values), strict=True)
    places = np.stack([_take_rows(rank, lowest.key, number_blocks(rank.placed.table)) for rank in values])
    has_row = np.stack([find_rows(rank.key, lowest.key) >= 0 for rank in values])
    is_reduced = lowest.placed.phase != PHASES.index(BACKWARD)
    has_row &= lowest.placed.is_of(*_COPIED) & is_reduced & ~find_unread(lowest.placed.table)
    differs, compared, by_hash = np.zeros(has_row.shape[1], bool), np.zeros(has_row.shape[1], bool), 0
    for one in range(len(values)):
        for other in range(one + 1, len(values)):
            both = has_row[one] & has_row[other] & (places[one] == places[other])
            with_hash = both & hashed[one][:, -1].astype(bool) & hashed[other][:, -1].astype(bool)
            compared |= both
            is_same = (numbers[one] == numbers[other]).all(axis=1)
            is_same &= ~with_hash | (hashed[one] == hashed[other]).all(axis=1)
            differs |= both & ~is_same
            by_hash = max(by_hash, int(with_hash.sum()))
    step = lowest.placed.step
    bad = np.flatnonzero(differs)
    steps = tuple(np.unique(step[bad]).tolist())
    first = bad[step[bad] == steps[0]] if steps else bad
    order = np.lexsort((first, lowest.placed.moment[first]))
    identities = [
        np.concatenate([places[at][:, None], numbers[at], hashed[at]], axis=1) for at in range(len(values))
    ]
    found = _describe(values, lowest, first[order], identities, has_row)
    return ReplicaCheck(
        compared=int(compared.sum()), by_hash=by_hash, first=tuple(found), disagreeing_steps=steps
    )


def _read_identity(rank: RankValues, key: Rows) -> tuple[Column, Column]:
    """Returns the bits of the statistics for each key, and those of the hash, behind which is whether there is one."""
    table, at = rank.placed.table, find_rows(rank.key, key)
    if not table.num_rows:
        return np.zeros((len(key), len(_STATISTICS)), np.int64), np.zeros((len(key), 2), np.int64)
    numbers = np.stack([bits_of(to_numpy(table[name], null=-1)) for name in _STATISTICS], axis=1)[at]
    hashes = [b"" if found is None else found for found in table["hash"].to_pylist()]
    bits = [(int.from_bytes(found, "little", signed=True), bool(found)) for found in hashes]
    return numbers, np.array(bits, np.int64).reshape(-1, 2)[at]


def _take_rows(rank: RankValues, key: Rows, column: Column) -> Column:
    """Returns a column of a rank's values for each key; anything where it has no row."""
    return column[find_rows(rank.key, key)] if len(column) else np.zeros(len(key), np.int64)


def _describe(
    values: Sequence[RankValues],
    lowest: RankValues,
    rows: Rows,
    identities: Sequence[Column],
    has_row: Column,
) -> Iterator[Disagreement]:
    sites = read_sites(lowest.placed.data)
    norms = [rank.placed.read_stats().l2 for rank in values]
    at = [find_rows(rank.key, lowest.key) for rank in values]
    for row in rows.tolist():
        site = sites[int(lowest.placed.site_id[row])]
        of_place: dict[Any, list[int]] = {}
        for number in np.flatnonzero(has_row[:, row]).tolist():
            of_place.setdefault(identities[number][row].tobytes(), []).append(number)
        # Of a DTensor only the ranks at one place are compared.
        place = Counter(
            int(identities[number][row][0]) for group in of_place.values() for number in group[:1]
        )
        most = place.most_common(1)[0][0]
        same = [group for group in of_place.values() if int(identities[group[0]][row][0]) == most]
        groups = sorted(same, key=lambda group: (-len(group), group[0]))
        sizes = [float(norms[group[0]][at[group[0]][row]]) for group in groups[:2]]
        yield Disagreement(
            step=int(lowest.placed.step[row]),
            role=site.role or "",
            path=site.path,
            slot=site.slot,
            groups=tuple(tuple(values[number].rank for number in group) for group in groups),
            factor=sizes[1] / sizes[0] if len(sizes) > 1 and sizes[0] else np.nan,
        )
