"""Checks that the replicas of parameters, reduced gradients and optimizer states are equal on all ranks."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ...recording.arrow.arrays import from_numpy, to_numpy
from ...recording.module_path import join
from ...recording.phase import BACKWARD, PHASES
from ...recording.protocols import RecordingData
from ...recording.role import OPTIMIZER_STATE, PARAMETER, PARAMETER_GRAD, UPDATE
from ...recording.statistics.moments import RAW
from ...recording.suggestions import ranges_of
from ..tables.columns import Bools, Column, Rows, bits_of, join_columns, mix_columns
from ..tables.rank_values import (
    RankValues,
    StepOrder,
    find_incomparable,
    number_blocks,
    read_rank_values,
)
from ..tables.sites import read_sites
from ..tables.stages import name_stages
from ..tables.tensors import read_sizes
from .split_outputs import SplitOutput, find_split_output

#: The roles of tensors that are replicated. A buffer may be a rank's own, as the statistics of BatchNorm are.
_REPLICATED = (PARAMETER, PARAMETER_GRAD, OPTIMIZER_STATE, UPDATE)

#: The wrapper of FSDP1, below which each rank has shards of its own without a DTensor that says so.
_FSDP1 = "FullyShardedDataParallel"


@dataclass(frozen=True, kw_only=True)
class Disagreement:
    """A tensor whose replicas differ from rank to rank."""

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

    def __str__(self) -> str:
        ranks = sorted(rank for group in self.groups for rank in group)
        who = (
            f"rank {self.alone} alone has" if self.alone is not None else f"the ranks {ranges_of(ranks)} have"
        )
        return f"{who} other numbers in {self.role} {self.name}, step {self.step}"

    @property
    def alone(self) -> int | None:
        """The only rank that disagrees with all others, which agree; None if it cannot be told."""
        is_told = len(self.groups) == 2 and len(self.groups[1]) == 1 and len(self.groups[0]) > 1
        return self.groups[1][0] if is_told else None


@dataclass(frozen=True, kw_only=True)
class ReplicaCheck:
    """Which replicas were compared, and which differ."""

    measured: int  # how many rows of parameters, gradients and states could have replicas
    compared: int  # how many tensors of which at least two ranks have a measured row
    by_hash: int  # how many of them by hashes; the others by all statistics
    uncompared: tuple[int, ...]  # the ranks that have none of these tensors
    #: The tensors that disagree in the first step in which any does, in the order in which they were measured.
    first: tuple[Disagreement, ...]
    disagreeing_steps: tuple[int, ...]  # the steps in which any tensor disagrees
    #: Whether the first disagreement is in the first compared step, and each rank has other numbers than any other: the
    #: ranks may each have a model, or a part of it, of their own.
    may_be_own: bool
    #: The first output of a module without parameters that differs on ranks of tensor parallelism; None if there is
    #: none, or outputs and parameters were not measured.
    split_output: Disagreement | None = None


def check_replicas(ranks: Sequence[tuple[int, RecordingData]]) -> ReplicaCheck:
    """Compares the replicas of each tensor on several ranks, by their hashes or by all tier-1 statistics.

    Replicas are the shards of a DTensor at one offset, and any other parameters of one shape, their gradients when the
    optimizer uses them, and its states: ranks that train one model have equal ones. Partial sums, what was
    not measured, and all of a model in FSDP1 are left out.
    """
    values = read_rank_values(name_stages(ranks))
    rows = _Replicas(**join_columns([_read_replicas(number, rank) for number, rank in enumerate(values)]))
    _, group = np.unique(mix_columns(np.stack([rows.key, rows.place], axis=1)), return_inverse=True)
    group = group.reshape(-1)
    is_hashed = np.bincount(group, ~rows.is_hashed) == 0
    identity = np.where(is_hashed[group], rows.hash, rows.statistics)
    of_identities = np.unique(np.stack([group, identity], axis=1), axis=0)[:, 0]
    is_compared = (np.bincount(group) > 1)[group]
    bad = np.flatnonzero((np.bincount(of_identities) > 1)[group])
    first = bad[rows.when[bad] == rows.when[bad].min(initial=_NEVER)]
    groups = dict.fromkeys(group[first[np.argsort(rows.moment[first], kind="stable")]].tolist())
    found = [_describe(values, rows, np.flatnonzero(group == number), identity) for number in groups]
    of_ranks = {values[number].rank for number in np.unique(rows.rank[is_compared]).tolist()}
    begins_so = len(first) > 0 and bool(rows.when[first[0]] == rows.when[is_compared].min())
    return ReplicaCheck(
        measured=len(group),
        compared=len(np.unique(group[is_compared])),
        by_hash=len(np.unique(group[is_compared & is_hashed[group]])),
        uncompared=tuple(rank.rank for rank in values if rank.rank not in of_ranks),
        first=tuple(found),
        disagreeing_steps=tuple(
            np.unique(rows.step[bad[np.unique(group[bad], return_index=True)[1]]]).tolist()
        ),
        may_be_own=begins_so and all(len(ranks_) == 1 for ranks_ in found[0].groups),
        split_output=_describe_split(find_split_output(values)),
    )


_NEVER = np.iinfo(np.int64).max


@dataclass(frozen=True, kw_only=True, eq=False)
class _Replicas:
    """Rows of `values` of all ranks, those of lower ranks first."""

    key: Rows  # see `RankValues`
    place: Rows  # a number for the shape and, of a DTensor, the offset
    rank: Rows  # the position of the rank among all
    row: Rows  # in the rank's table
    step: Rows
    when: Rows  # see `StepOrder.place`
    moment: Rows
    hash: Rows
    is_hashed: Bools
    statistics: Rows  # a number that is equal for equal statistics


def _read_replicas(number: int, rank: RankValues) -> _Replicas:
    placed = rank.placed
    is_measured = to_numpy(placed.table["count"].is_valid()) | to_numpy(placed.table["hash"].is_valid())
    is_reduced = placed.phase != PHASES.index(BACKWARD)
    kept = placed.is_of(*_REPLICATED) & is_reduced & is_measured & ~find_incomparable(placed.table)
    if any(row.startswith(_FSDP1) for row in placed.data.table("modules")["type"].to_pylist()):
        kept[:] = False
    rows = np.flatnonzero(kept)
    table = placed.table.select(["shape", "hash", "global_offset", *RAW]).take(from_numpy(rows))
    hashes = [b"" if found is None else found for found in table["hash"].to_pylist()]
    order = StepOrder(placed.data)
    return _Replicas(
        key=rank.key[rows],
        place=mix_columns(read_sizes(table["shape"])) ^ number_blocks(table),
        rank=np.full(len(rows), number),
        row=rows,
        step=placed.step[rows].astype(np.int64),
        when=np.array([order.place(step) for step in placed.step[rows].tolist()], np.int64),
        moment=placed.moment[rows],
        hash=np.array([int.from_bytes(found, "little", signed=True) for found in hashes], np.int64),
        is_hashed=np.array([bool(found) for found in hashes], bool),
        statistics=mix_columns(bits_of(table, RAW)),
    )


def _describe(values: Sequence[RankValues], rows: _Replicas, members: Rows, identity: Column) -> Disagreement:
    of_identity: dict[int, list[int]] = {}
    for member in members.tolist():
        of_identity.setdefault(int(identity[member]), []).append(member)
    groups = sorted(of_identity.values(), key=lambda group: (-len(group), group[0]))
    lowest = int(members[0])
    placed = values[rows.rank[lowest]].placed
    site_id = int(placed.site_id[rows.row[lowest]])
    site = read_sites(placed.data, np.array([site_id]))[site_id]
    norms = [_read_norm(values[rows.rank[group[0]]], int(rows.row[group[0]])) for group in groups[:2]]
    return Disagreement(
        step=int(rows.step[lowest]),
        role=site.role or "",
        path=site.path,
        slot=site.slot,
        groups=tuple(tuple(values[rows.rank[member]].rank for member in group) for group in groups),
        factor=norms[1] / norms[0] if norms[0] else math.nan,
    )


def _describe_split(split: SplitOutput | None) -> Disagreement | None:
    if split is None:
        return None
    placed = split.rank.placed
    site_id = int(placed.site_id[split.row])
    site = read_sites(placed.data, np.array([site_id]))[site_id]
    return Disagreement(
        step=int(placed.step[split.row]),
        role=site.role or "",
        path=site.path,
        slot=site.slot,
        groups=((split.rank.rank,), split.others),
        factor=math.nan,
    )


def _read_norm(rank: RankValues, row: int) -> float:
    square = rank.placed.table["sumsq"][row].as_py()
    return math.nan if square is None else math.sqrt(square)
