"""Checks that ranks agree on what each of them has a copy of: parameters, reduced gradients, optimizer states."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ...recording.arrow.arrays import from_numpy, to_numpy
from ...recording.module_path import join
from ...recording.phase import BACKWARD, PHASES
from ...recording.protocols import RecordingData
from ...recording.role import OPTIMIZER_STATE, PARAMETER, PARAMETER_GRAD, UPDATE
from ...recording.statistics.moments import RAW
from ..tables.columns import Column, Rows
from ..tables.rank_values import (
    RankValues,
    StepOrder,
    bits_of,
    find_unread,
    mix_columns,
    number_blocks,
    read_rank_values,
)
from ..tables.sites import Site, read_sites
from ..tables.tensors import read_sizes

#: The roles of tensors of which ranks have copies. A buffer may be a rank's own, as the statistics of BatchNorm are.
_COPIED = (PARAMETER, PARAMETER_GRAD, OPTIMIZER_STATE, UPDATE)

#: The name of FSDP1's parameters, of which each rank has another part.
_FLAT = "_flat_param"


@dataclass(frozen=True, kw_only=True)
class Disagreement:
    """A tensor of which ranks have other numbers than others, although each has a copy of it."""

    step: int  # on the lowest rank that has it
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

    compared: int  # how many tensors of which at least two ranks have a measured row
    by_hash: int  # how many of them by hashes; the others by all statistics
    uncompared: tuple[int, ...]  # the ranks that have none of these tensors
    #: The tensors that disagree in the first step in which any does, in the order in which they were measured.
    first: tuple[Disagreement, ...]
    disagreeing_steps: tuple[int, ...]  # the steps in which any tensor disagrees
    #: Whether the first disagreement is in the first compared step, and each rank has other numbers than any other: the
    #: ranks may each have a model, or a part of it, of their own.
    may_be_own: bool


def check_replicas(ranks: Sequence[tuple[int, RecordingData]]) -> ReplicaCheck:
    """Compares the tensors of which several ranks have a copy, bit by bit, by their hashes or by all statistics.

    Of DTensors the parts at one place are copies. Other parameters of one shape, their gradients when the optimizer
    uses them, and its states have one value on all ranks that train one model. Partial sums, FSDP1's flat parameters
    and what was not measured are left out.
    """
    values = read_rank_values(ranks)
    parts = [_read_copies(number, rank) for number, rank in enumerate(values)]
    rows = np.concatenate(parts, axis=0)
    rows = rows[np.lexsort((rows[:, _RANK], rows[:, _PLACE], rows[:, _KEY]))]
    is_new = np.ones(len(rows), bool)
    is_new[1:] = (rows[1:, [_KEY, _PLACE]] != rows[:-1, [_KEY, _PLACE]]).any(axis=1)
    group = np.cumsum(is_new) - 1
    sizes = np.bincount(group)
    is_hashed = np.bincount(group, rows[:, _IS_HASHED] == 0) == 0 if len(rows) else np.zeros(0, bool)
    identity = (
        np.where(is_hashed[group], rows[:, _HASH], rows[:, _STATISTICS])
        if len(rows)
        else np.zeros(0, np.int64)
    )
    differs = np.zeros(len(sizes), bool)
    differs[group[~is_new & (identity != np.roll(identity, 1))]] = True
    first_rows = np.flatnonzero(is_new)
    bad = np.flatnonzero(differs)
    when = rows[first_rows[bad], _WHEN]
    first = bad[when == when.min()] if len(bad) else bad
    first = first[np.argsort(rows[first_rows[first], _MOMENT], kind="stable")]
    compared = sizes > 1
    found = tuple(_describe(values, rows, np.flatnonzero(group == at), identity) for at in first.tolist())
    of_ranks = np.unique(rows[compared[group], _RANK]).tolist() if len(rows) else []
    told = {values[number].rank for number in of_ranks}
    earliest = rows[compared[group], _WHEN].min() if compared.any() else 0
    return ReplicaCheck(
        compared=int(compared.sum()),
        by_hash=int((compared & is_hashed).sum()),
        uncompared=tuple(rank.rank for rank in values if rank.rank not in told),
        first=found,
        disagreeing_steps=tuple(np.unique(rows[first_rows[bad], _STEP]).tolist()),
        may_be_own=bool(found)
        and bool(when.min() == earliest)
        and all(len(one) == 1 for one in found[0].groups),
    )


#: The columns of the copies of all ranks.
_KEY, _PLACE, _RANK, _ROW, _STEP, _WHEN, _MOMENT, _HASH, _IS_HASHED, _STATISTICS = range(10)


def _read_copies(number: int, rank: RankValues) -> Rows:
    """Returns the rows of a rank that other ranks may have a copy of; `number` is put where the rank is."""
    placed = rank.placed
    is_measured = to_numpy(placed.table["count"].is_valid()) | to_numpy(placed.table["hash"].is_valid())
    is_reduced = placed.phase != PHASES.index(BACKWARD)
    kept = placed.is_of(*_COPIED) & is_reduced & is_measured & ~find_unread(placed.table)
    kept &= np.array([*(_FLAT not in slot for slot in placed.slots), True])[placed.slot]
    rows = np.flatnonzero(kept)
    table = placed.table.select(["shape", "hash", "global_offset", *RAW]).take(from_numpy(rows))
    hashes = [b"" if found is None else found for found in table["hash"].to_pylist()]
    order = StepOrder(placed.data)
    columns = [
        rank.key[rows],
        mix_columns(read_sizes(table["shape"])) ^ number_blocks(table),
        np.full(len(rows), number),
        rows,
        placed.step[rows],
        np.array([order.place(step) for step in placed.step[rows].tolist()], np.int64),
        placed.moment[rows],
        np.array([int.from_bytes(found, "little", signed=True) for found in hashes], np.int64),
        np.array([bool(found) for found in hashes], np.int64),
        mix_columns(np.stack([bits_of(to_numpy(table[name], null=-1)) for name in RAW], axis=1)),
    ]
    return np.stack([np.asarray(column, np.int64) for column in columns], axis=1)


def _describe(values: Sequence[RankValues], rows: Rows, members: Rows, identity: Column) -> Disagreement:
    of_identity: dict[int, list[int]] = {}
    for member in members.tolist():
        of_identity.setdefault(int(identity[member]), []).append(member)
    groups = sorted(of_identity.values(), key=lambda group: (-len(group), group[0]))
    lowest = rows[members[0]]
    placed = values[lowest[_RANK]].placed
    site: Site = read_sites(placed.data)[int(placed.site_id[lowest[_ROW]])]
    sizes = [_norm(values, rows[group[0]]) for group in groups[:2]]
    return Disagreement(
        step=int(lowest[_STEP]),
        role=site.role or "",
        path=site.path,
        slot=site.slot,
        groups=tuple(tuple(values[rows[member, _RANK]].rank for member in group) for group in groups),
        factor=sizes[1] / sizes[0] if sizes[0] else np.nan,
    )


def _norm(values: Sequence[RankValues], row: Rows) -> float:
    square = values[row[_RANK]].placed.table["sumsq"][int(row[_ROW])].as_py()
    return float("nan") if square is None else float(square) ** 0.5
