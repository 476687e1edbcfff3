"""Reads the recordings of several ranks as one: that of a run on a single device."""

from collections import Counter
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import replace
from functools import cached_property
from itertools import chain, combinations
from typing import NamedTuple

import numpy as np
import pyarrow as pa

from ...recording.arrow.arrays import from_numpy, to_numpy
from ...recording.meta import ALL_RANKS, RunMeta
from ...recording.phase import BACKWARD, PHASES
from ...recording.protocols import RecordingData
from ...recording.raw_tensor import RawTensor
from ...recording.role import (
    GRAD_INPUT,
    GRAD_OUTPUT,
    INPUT,
    LEAF,
    OP_OUTPUT,
    OUTPUT,
    PARAMETER,
    PARAMETER_GRAD,
)
from ...recording.suggestions import name_ranks, ranges_of
from .columns import ArrowTable, Bools, Column, Rows, bits_of, dictionary_codes, find_rows
from .merged_rows import ACTIVATION, GRADIENT, WEIGHT, merge_rows
from .rank_values import RankValues, StepOrder, find_incomparable, number_blocks, read_rank_values
from .stages import NamedStage, name_stages
from .united import UnitedRanks, name_modules, unite_values
from .values import IDENTITY, PlacedValues

#: The roles of tensors that have other numbers for each part of a batch.
BATCHED = (INPUT, OUTPUT, GRAD_INPUT, GRAD_OUTPUT, OP_OUTPUT, LEAF)


class RanksData:
    """The `RecordingData` of several ranks together. What is not measured is read from the lowest of them.

    Of rows of `values` with equal site, offset and shape only that of the lowest rank counts; the others are its
    replicas. The shards of a DTensor are merged, exactly but for sums (docs/ranks.md). Activations that differ from
    rank to rank and are no DTensors are merged too: each rank has a part of the batch, or of the features.
    """

    def __init__(self, ranks: Sequence[tuple[int, RecordingData]], missing: Sequence[int] = ()) -> None:
        """Holds the ranks, at least one, with their numbers in ascending order; `missing` have no folder."""
        measured = [(rank, data) for rank, data in ranks if data.table("values").num_rows]
        self.ranks = measured or ranks[:1]
        #: The marks of all ranks, and on ranks that are missing or measured nothing.
        self.marks = mark_ranks(self.ranks, missing)
        self.marks += [
            f"rank {rank}: nothing was measured" for rank, _ in ranks if rank not in dict(self.ranks)
        ]
        self._parts = name_stages(self.ranks)
        self._lowest = self._parts[0][1]

    @cached_property
    def meta(self) -> RunMeta:
        """The description of the lowest rank's run, with the marks of all."""
        marks = [*self.marks, *filter(None, (self._merged.lacking,))]
        return replace(self._lowest.meta, rank=ALL_RANKS, marks=tuple(marks), complete=not marks)

    def table(self, name: str) -> ArrowTable:
        """Returns all rows of a table.

        Raises:
            ValueError: there is no such table.
        """
        if name == "values":
            return self._merged.table
        return (self._united or self._lowest).table(name)

    def tensor(self, blob: str) -> RawTensor:
        """Returns a whole tensor of the lowest rank.

        Raises:
            RecordingError: the tensor cannot be read.
        """
        return self._lowest.tensor(blob)

    @property
    def has_stages(self) -> bool:
        """Whether the ranks have the stages of a pipeline."""
        return isinstance(self._lowest, NamedStage)

    @property
    def degree(self) -> int:
        """Into how many parts the batch is divided: the degree of data parallelism."""
        return self._merged.degree

    @cached_property
    def parameters(self) -> dict[Hashable, tuple[tuple[str | None, str | None], int]]:
        """The layout and the number of elements of each measured parameter on the lowest rank.

        The layout is the mesh and the placements, each None for what is no DTensor.
        """
        placed = self._values[0].placed
        rows = np.flatnonzero(placed.is_of(PARAMETER))[
            ::-1
        ]  # the last one counts: a model may be sharded later
        _, first = np.unique(np.stack([placed.module[rows], placed.slot[rows]]), axis=1, return_index=True)
        rows = rows[first]
        modules, slots = name_modules(self._parts[0][1]), (*placed.slots, None)
        names = zip(
            map(modules.get, placed.module[rows].tolist()),
            (slots[slot] for slot in placed.slot[rows].tolist()),
            strict=True,
        )
        mesh, placements = (
            placed.table[name].take(from_numpy(rows)).to_pylist() for name in ("mesh", "placements")
        )
        layouts = zip(mesh, placements, strict=True)
        return dict(zip(names, zip(layouts, placed.numel[rows].tolist(), strict=True), strict=True))

    @cached_property
    def groups(self) -> frozenset[str]:
        """The global ranks of each process group that a recorded collective ran in: `0-3,8`."""
        found = [data.table("collectives")["ranks"].unique().to_pylist() for _, data in self.ranks]
        return frozenset(filter(None, chain.from_iterable(found)))

    @property
    def most_parts(self) -> int:
        """Into how many parts ranks may have cut an activation: 1 in a pipeline, where micro-batches are parts, too."""
        return 1 if self.has_stages else len(self.ranks)

    @cached_property
    def _values(self) -> list[RankValues]:
        return read_rank_values(self._parts)

    @cached_property
    def _united(self) -> UnitedRanks | None:
        """The tables but `values`, if a rank has modules or tensors of the model that a lower one lacks."""
        names = [{*name_modules(data).values()} for _, data in self._parts]
        lowest = self._values[0].key
        of_model = [
            rank.key[(rank.placed.call_id < 0) & (rank.placed.op_id < 0)] for rank in self._values[1:]
        ]
        is_lacking = any(higher - names[0] for higher in names[1:])
        is_lacking |= any((find_rows(lowest, keys) < 0).any() for keys in of_model)
        return UnitedRanks(self._parts) if is_lacking else None

    @cached_property
    def _merged(self) -> "_Merged":
        united = self._united
        return _merge(self._values, self._values[0] if united is None else unite_values(self._values, united))


def as_one(ranks: Sequence[tuple[int, RecordingData]], missing: Sequence[int] = ()) -> RecordingData:
    """Returns several ranks together, or the only one as it is; `missing` are ranks of the run that have no folder."""
    return RanksData(ranks, missing) if len(ranks) > 1 else ranks[0][1]


#: A larger world is none, but damage of its description.
_MOST_RANKS = 2**20


def find_missing(ranks: Sequence[tuple[int, RecordingData]]) -> tuple[int, ...]:
    """Returns the ranks of the run that are not among all that were recorded."""
    world = max((data.meta.world_size for _, data in ranks), default=0)
    there = {rank for rank, _ in ranks}
    return tuple(rank for rank in range(world) if rank not in there) if world <= _MOST_RANKS else ()


def mark_ranks(ranks: Sequence[tuple[int, RecordingData]], missing: Sequence[int]) -> list[str]:
    """Returns the marks of several ranks, and one on those that have no folder."""
    marks = [f"rank {rank}: {mark}" for rank, data in ranks for mark in data.meta.marks]
    return [*marks, f"ranks of the run are missing: {ranges_of(missing)}"] if missing else marks


def describe_ranks(ranks: Iterable[int]) -> str:
    """Returns which ranks a recording has: `the ranks 0-3`, or `rank 0 alone`."""
    numbers = [*ranks]
    return f"rank {numbers[0]} alone" if len(numbers) == 1 else name_ranks(numbers)


class _Merged(NamedTuple):
    """The table `values` of all ranks merged into one."""

    table: ArrowTable
    degree: int  # the degree of data parallelism: into how many parts the batch is divided
    lacking: str | None  # a sentence on rows that are left out


def _merge(ranks: Sequence[RankValues], lowest: RankValues) -> _Merged:
    """Merges the rows of ranks; `lowest` has a row of each tensor, with the ids of the merged recording."""
    rows = [find_rows(rank.key, lowest.key) for rank in ranks]
    lacking = [(rank.rank, int(np.count_nonzero(find_rows(lowest.key, rank.key) < 0))) for rank in ranks]
    elsewhere = [f"{count} of rank {rank}" for rank, count in lacking if count]
    sentence = (
        f"tensors that rank {ranks[0].rank} lacks are left out: {', '.join(elsewhere)}" if elsewhere else None
    )
    table = lowest.placed.table
    counts = find_distinct(ranks, rows)
    degree = _degree(lowest, counts, rows)
    having = (np.stack(rows) >= 0).sum(axis=0)
    several = np.flatnonzero((counts.sum(axis=0) > 1) | ((degree > 1) & lowest.placed.is_of(*BATCHED)))
    is_part = to_numpy(table["global_shape"].is_valid())
    changed = np.unique(np.concatenate([several, np.flatnonzero(is_part | find_incomparable(table))]))
    if not len(changed):
        return _Merged(table, degree, sentence)
    are_gradients = lowest.placed.is_of(PARAMETER_GRAD) & _find_batched(lowest.placed)
    kinds = np.where(are_gradients, GRADIENT, np.where(_find_batched(lowest.placed), ACTIVATION, WEIGHT))
    merged = merge_rows(
        [rank.placed.table for rank in ranks],
        [of_rank[changed] for of_rank in rows],
        counts[:, changed],
        # An expert may be on some of the ranks only: of fewer parts of the batch.
        np.maximum(degree * having[changed] // max(having.max(initial=1), 1), 1),
        kinds[changed],
    )
    for name in ("step", "site_id", "call_id", "op_id", "order"):
        at_name = merged.schema.get_field_index(name)
        merged = merged.set_column(
            at_name, merged.schema.field(at_name), table[name].take(from_numpy(changed))
        )
    at = np.arange(table.num_rows)
    at[changed] = len(at) + np.arange(len(changed))
    return _Merged(pa.concat_tables([table, merged]).take(from_numpy(at)), degree, sentence)


def find_distinct(ranks: Sequence[RankValues], rows: Sequence[Rows]) -> Column:
    """Returns which rows count: `found[rank, row]` is False for a replica of a lower rank's, and for a missing row.

    Args:
        ranks: the values of each rank.
        rows: for each rank, its row for each row of the lowest rank's; -1 for none.
    """
    identities = [_identify(rank.placed, at) for rank, at in zip(ranks, rows, strict=True)]
    counts = np.array([at >= 0 for at in rows])
    for lower, higher in combinations(range(len(ranks)), 2):
        is_same = (identities[lower] == identities[higher]).all(axis=1)
        counts[higher] &= ~(counts[lower] & is_same)
    return counts


def _identify(values: PlacedValues, rows: Rows) -> Column:
    """Returns numbers that are equal for rows of two ranks if these are of one shard, or of equal tensors.

    A parameter has one value on all ranks, so shards at one offset are replicas, equal or not. An activation may be of
    another part of the batch on another mesh.
    """
    table, is_batched = values.table, _find_batched(values)
    if not table.num_rows:
        return np.zeros((len(rows), len(IDENTITY) + 1), np.int64)
    identity = bits_of(table, IDENTITY)
    blocks = number_blocks(table)
    identity[~is_batched | (blocks != 0)] = 0
    mesh, meshes = dictionary_codes(table["mesh"])
    identity[is_batched, 0] += np.array([*map(hash, meshes), 0], np.int64)[mesh[is_batched]]
    return np.concatenate([identity, blocks[:, None]], axis=1)[rows]


def _find_batched(values: PlacedValues) -> Bools:
    """Returns which rows are of tensors that have other numbers for each part of a batch."""
    in_backward = values.phase == PHASES.index(BACKWARD)
    return np.asarray(values.is_of(*BATCHED) | (values.is_of(PARAMETER_GRAD) & in_backward))


def _degree(lowest: RankValues, counts: Column, rows: Sequence[Rows]) -> int:
    """Returns the degree of data parallelism: how many parts most outputs of training steps have.

    Outputs that are DTensors, or that only some ranks have, are left out. So are steps of evaluation, which ranks may
    run alone or on the same batch, unless there are no others.
    """
    values = lowest.placed
    kept = values.is_of(OUTPUT) & ~to_numpy(values.table["global_shape"].is_valid()) & (values.numel > 1)
    having = (np.stack(rows) >= 0).sum(axis=0)
    kept &= having == having[kept].max(initial=0)
    is_training = np.isin(values.step, StepOrder(values.data).training)
    kept = kept & is_training if (kept & is_training).any() else kept
    found = Counter(counts[:, kept].sum(axis=0).tolist()).most_common(1)
    return int(found[0][0]) if found else 1
