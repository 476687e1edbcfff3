"""Reads the recordings of several ranks as one: that of a run on a single device."""

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import combinations
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from ...recording.arrow.arrays import from_list, from_numpy, to_numpy
from ...recording.meta import ALL_RANKS, RunMeta
from ...recording.phase import BACKWARD, PHASES
from ...recording.protocols import RecordingData
from ...recording.raw_tensor import RawTensor
from ...recording.role import GRAD_INPUT, GRAD_OUTPUT, INPUT, LEAF, OP_OUTPUT, OUTPUT, PARAMETER_GRAD
from ...recording.statistics.fingerprints import (
    hash_from_bytes,
    hash_to_bytes,
    merge_hashes,
    merge_sketches,
)
from ...recording.statistics.moments import RAW, add_up
from ...recording.suggestions import count_of, ranges_of
from .columns import ArrowTable, Bools, Column, Rows, count_before, dictionary_codes, find_rows
from .placement import NO_MODULE, NOWHERE, Placer
from .tensors import read_sizes
from .values import PlacedValues

#: The note of recordings whose rows of DTensors have the numbers of a part beside the shape of the whole.
OLD_NOTE = "DTensor: the part on this rank"

#: The beginning of the text that torch prints for the placement of a partial sum.
_PARTIAL = "P"

#: Statistics that are equal bit by bit where tensors are; two tensors that differ share all of them by a rare chance.
_IDENTITY = ("numel", *RAW, "sumabs", "sum4", "zero_count")

#: The roles of tensors that have other numbers for each part of a batch.
_BATCHED = (INPUT, OUTPUT, GRAD_INPUT, GRAD_OUTPUT, OP_OUTPUT, LEAF)

#: The roles of gradients that are those of a mean over a rank's part of the batch.
_SCALED = (GRAD_INPUT, GRAD_OUTPUT)

#: Columns that merged rows need, also where they are null.
_NEEDED = ("count", "note", "placements", "mesh", "global_shape", "global_offset", "sumabs", "sum4", "zero_count",
           "first_index", "hash", "sketch", "histogram")  # fmt: skip

#: What is known of a tensor, but not of several parts together.
_OF_ONE_PART = ("argmax", "channel_max", "sample", "user", "blob")


@dataclass(frozen=True, kw_only=True, eq=False)
class RankValues:
    """The rows of `values` of one rank, in the order of keys that are equal on all ranks."""

    rank: int
    placed: PlacedValues
    key: Rows  # of each row; rows of one step, phase, module, call, role and slot have the same on all ranks


class RanksData:
    """The `RecordingData` of several ranks together. What is not measured is read from the lowest of them.

    Of rows of `values` with equal site, offset and shape only that of the lowest rank counts; the others are its
    replicas. The parts of a DTensor become the whole, exactly but for its sums (docs/ranks.md). Tensors that differ
    from rank to rank and are no DTensors are parts of one too: of a batch, or of the features.
    """

    def __init__(self, ranks: Sequence[tuple[int, RecordingData]]) -> None:
        """Holds the ranks, at least one, with their numbers in ascending order."""
        self.ranks = ranks
        self._lowest = ranks[0][1]

    @property
    def meta(self) -> RunMeta:
        """The description of the lowest rank's run, with the marks of all."""
        marks = [f"rank {rank}: {mark}" for rank, data in self.ranks for mark in data.meta.marks]
        meta = self._lowest.meta
        missing = sorted({*range(meta.world_size)}.difference(rank for rank, _ in self.ranks))
        if missing:
            marks.append(
                f"{count_of(len(missing), 'rank')} of {meta.world_size} missing: {ranges_of(missing)}"
            )
        if self._merged.lacking:
            marks.append(self._merged.lacking)
        return replace(meta, rank=ALL_RANKS, marks=tuple(marks), complete=not marks)

    def table(self, name: str) -> ArrowTable:
        """Returns all rows of a table.

        Raises:
            ValueError: there is no such table.
        """
        return self._merged.table if name == "values" else self._lowest.table(name)

    def tensor(self, blob: str) -> RawTensor:
        """Returns a whole tensor of the lowest rank.

        Raises:
            RecordingError: the tensor cannot be read.
        """
        return self._lowest.tensor(blob)

    @property
    def degree(self) -> int:
        """Into how many parts the batch is divided: the degree of data parallelism."""
        return self._merged.degree

    @cached_property
    def _merged(self) -> "_Merged":
        return _merge(read_rank_values(self.ranks))


def as_one(ranks: Sequence[tuple[int, RecordingData]]) -> RecordingData:
    """Returns several ranks together, or the only one as it is."""
    return RanksData(ranks) if len(ranks) > 1 else ranks[0][1]


def describe_ranks(ranks: Iterable[int]) -> str:
    """Returns which ranks a recording has: `the ranks 0-3`, or `rank 0 alone`."""
    numbers = [*ranks]
    return f"rank {numbers[0]} alone" if len(numbers) == 1 else f"the ranks {ranges_of(numbers)}"


def read_rank_values(ranks: Sequence[tuple[int, RecordingData]]) -> list[RankValues]:
    """Returns the values of all ranks, with keys by which rows of several ranks are found to be of one tensor."""
    known: dict[Any, int] = {}
    keys: list[Rows] = []
    placed = [PlacedValues(data=data, table=data.table("values")) for _, data in ranks]
    for values in placed:
        site = np.array([*(known.setdefault(name, len(known)) for name in _name_sites(values)), -1])[
            values.site
        ]
        keys.append(np.stack([values.step, values.phase, site], axis=1).astype(np.int64))
    sizes = np.cumsum([0, *map(len, keys)])
    every = np.concatenate(keys) if keys else np.empty((0, 3), np.int64)
    _, number = np.unique(every, axis=0, return_inverse=True)
    number = number.reshape(-1)
    found = []
    for (rank, _), values, first, last in zip(ranks, placed, sizes, sizes[1:], strict=False):
        of_site = number[first:last]
        repeat = count_before(of_site)  # of a module that returns one tensor twice, say
        found.append(
            RankValues(rank=rank, placed=values, key=of_site * 2**20 + np.minimum(repeat, 2**20 - 1))
        )
    return found


def _name_sites(values: PlacedValues) -> Iterator[tuple[Any, ...]]:
    placer = Placer(values.data)
    names = placer.name_modules()
    for row in values.data.table("sites").to_pylist():
        module = row["module_id"]
        place = NOWHERE if module is None or module == NO_MODULE else placer.place(module, NOWHERE)
        name = None if place == NOWHERE else names[place][:2] if place < len(names) else None
        yield name, *(row[column] for column in ("nth", "role", "slot", "op", "op_nth"))


# ---- Merging.


class _Merged(NamedTuple):
    """The values of all ranks together."""

    table: ArrowTable
    degree: int  # into how many parts the batch is divided
    lacking: str | None  # a sentence on rows that the lowest rank lacks


def _merge(ranks: Sequence[RankValues]) -> _Merged:
    lowest = ranks[0]
    rows = [find_rows(rank.key, lowest.key) for rank in ranks]
    lacking = [(rank.rank, int(np.count_nonzero(find_rows(lowest.key, rank.key) < 0))) for rank in ranks[1:]]
    elsewhere = [f"{count} of rank {rank}" for rank, count in lacking if count]
    sentence = (
        f"tensors that rank {lowest.rank} lacks are left out: {', '.join(elsewhere)}" if elsewhere else None
    )
    tables = [rank.placed.table for rank in ranks]
    counts = find_distinct(ranks, rows)
    degree = _degree(lowest, counts)
    several = np.flatnonzero(counts.sum(axis=0) > 1)
    is_part = to_numpy(tables[0]["global_shape"].is_valid())
    changed = np.unique(np.concatenate([several, np.flatnonzero(is_part | find_unread(tables[0]))]))
    if not len(changed):
        return _Merged(tables[0], degree, sentence)
    are_gradients = lowest.placed.is_of(PARAMETER_GRAD) & _find_batched(lowest.placed)
    merged = _merge_rows(
        tables, [of_rank[changed] for of_rank in rows], counts[:, changed], degree, are_gradients[changed]
    )
    at = np.arange(tables[0].num_rows)
    at[changed] = len(at) + np.arange(len(changed))
    return _Merged(pa.concat_tables([tables[0], merged]).take(from_numpy(at)), degree, sentence)


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
    """Returns numbers by which the rows of two ranks are known to be of one block, or of equal tensors.

    A parameter has one value on all ranks, so blocks at one offset are copies, equal or not. An activation may be of
    another part of the batch on another mesh.
    """
    table, is_batched = values.table, _find_batched(values)
    if not table.num_rows:
        return np.zeros((len(rows), len(_IDENTITY) + 1), np.int64)
    identity = np.stack([bits_of(to_numpy(table[name], null=-1)) for name in _IDENTITY], axis=1)
    blocks = number_blocks(table)
    identity[~is_batched | (blocks != 0)] = 0
    mesh, meshes = dictionary_codes(table["mesh"])
    identity[is_batched, 0] += np.array([*map(hash, meshes), 0], np.int64)[mesh[is_batched]]
    return np.concatenate([identity, blocks[:, None]], axis=1)[rows]


def _find_batched(values: PlacedValues) -> Bools:
    """Returns which rows are of tensors that have other numbers for each part of a batch."""
    in_backward = values.phase == PHASES.index(BACKWARD)
    return np.asarray(values.is_of(*_BATCHED) | (values.is_of(PARAMETER_GRAD) & in_backward))


def number_blocks(table: ArrowTable) -> Rows:
    """Returns a number for the place and the shape of each row in its DTensor; 0 for what is none."""
    numbers = np.zeros(table.num_rows, np.int64)
    offsets = table["global_offset"]
    if offsets.null_count == len(offsets):
        return numbers
    rows = np.flatnonzero(to_numpy(offsets.is_valid()))
    found = table.select(["global_offset", "shape"]).take(from_numpy(rows))
    sizes = np.concatenate([read_sizes(found["global_offset"]), read_sizes(found["shape"])], axis=1)
    number = np.full(len(rows), sizes.shape[1], np.uint64)
    for column in sizes.T:  # FNV-1a, of whole numbers in place of bytes
        number = (number ^ column.astype(np.uint64)) * np.uint64(0x100000001B3)
    numbers[rows] = number.view(np.int64) | 1
    return numbers


def bits_of(numbers: Column) -> Column:
    """Returns numbers as integers that are equal where they are equal bit by bit; all NaN are one."""
    if numbers.dtype.kind != "f":
        return numbers.astype(np.int64)
    return np.where(np.isnan(numbers), np.nan, numbers).astype(np.float64).view(np.int64)


def find_unread(table: ArrowTable) -> Bools:
    """Returns which rows say nothing of a tensor of the model: partial sums, and parts in old recordings."""
    placement, placements = dictionary_codes(table["placements"])
    note, notes = dictionary_codes(table["note"])
    is_partial = np.array([*(_PARTIAL in text for text in placements), False])
    is_old = np.array([*(text == OLD_NOTE for text in notes), False])
    return np.asarray(is_partial[placement] | is_old[note])


def _degree(lowest: RankValues, counts: Column) -> int:
    """Returns into how many parts the batch is divided: as many as the first output that is no DTensor has."""
    values = lowest.placed
    rows = np.flatnonzero(values.is_of(OUTPUT) & ~to_numpy(values.table["global_shape"].is_valid()))
    return int(counts[:, rows[0]].sum()) if len(rows) else 1


def _merge_rows(
    tables: Sequence[ArrowTable], rows: Sequence[Rows], counts: Column, degree: int, are_gradients: Bools
) -> ArrowTable:
    """Returns merged rows, in the schema of the tables; each has a row in the lowest rank."""
    schema = tables[0].schema
    used = [
        field.name for field in schema if any(table[field.name].null_count < len(table) for table in tables)
    ]
    needed = dict.fromkeys([*used, *_NEEDED])  # taking apart a column of nulls would be the most of the work
    parts = [
        [table.select([*needed]).take(from_numpy(np.maximum(at, 0))).to_pylist(), mine]
        for table, at, mine in zip(tables, rows, counts, strict=True)
    ]
    merged = [
        _merge_parts([of_rank[row] for of_rank, mine in parts if mine[row]], degree, is_gradient)
        for row, is_gradient in enumerate(are_gradients.tolist())
    ]
    columns = [from_list([row.get(field.name) for row in merged], field.type) for field in schema]
    return pa.Table.from_arrays(columns, schema=schema)


def _merge_parts(parts: Sequence[dict[str, Any]], degree: int, is_gradient: bool) -> dict[str, Any]:
    """Returns the row of a tensor, given those of its parts without copies.

    Args:
        parts: the rows.
        degree: into how many parts the batch is divided.
        is_gradient: it is of a parameter in backward, so that what ranks have adds up.
    """
    row = dict(parts[0])
    whole, placements = row["global_shape"], row["placements"] or ""
    meshes = len({part["mesh"] for part in parts})
    if whole is not None:  # an activation on several meshes is of several parts of the batch
        row["shape"] = [size * meshes if at == 0 else size for at, size in enumerate(whole)]
        row["global_shape"], row["global_offset"] = row["shape"], [0] * len(whole)
        row["numel"] = math.prod(row["shape"])
    if row["note"] == OLD_NOTE or _PARTIAL in placements or (is_gradient and len(parts) > 1):
        return {**row, **_NOTHING, "note": _why_unread(row)}
    if len(parts) == 1:
        return row
    if not row["shape"] and whole is None:
        return {**row, **dict.fromkeys((*_OF_ONE_PART, "hash", "sketch")), **_average(parts)}
    if whole is None:
        row["shape"] = _join_shapes([part["shape"] for part in parts], degree)
        row["numel"] = sum(part["numel"] for part in parts)
    row.update(dict.fromkeys(_OF_ONE_PART))
    row.update(_merge_statistics(parts), note=next((part["note"] for part in parts if part["note"]), None))
    if row["nan_count"] or row["inf_count"]:
        row["first_index"] = _first_index(parts) if whole is not None and meshes == 1 else None
    is_whole = whole is not None and meshes == 1
    row["hash"] = _merge_all(parts, "hash", _add_hashes) if is_whole else None
    row["sketch"] = (
        _merge_all(parts, "sketch", lambda found: merge_sketches(found).tolist()) if is_whole else None
    )
    row["histogram"] = _merge_all(parts, "histogram", lambda found: np.sum(found, axis=0).tolist())
    return row


_NOTHING: dict[str, Any] = {
    **dict.fromkeys(
        (*RAW, *_OF_ONE_PART, "first_index", "sumabs", "zero_count", "sum4", "hash", "sketch", "histogram")
    ),
    "nan_count": 0,
    "inf_count": 0,
}


def _why_unread(row: dict[str, Any]) -> str:
    if row["note"] == OLD_NOTE:
        return "not comparable: the part of a DTensor, recorded by an older modtrace without its place"
    if row["placements"] is None or _PARTIAL not in row["placements"]:
        return "not comparable: the gradient of a part of the batch, before it is reduced"
    return f"not comparable: a partial sum ({row['placements']}) that is not reduced yet"


def _merge_statistics(parts: Sequence[dict[str, Any]]) -> dict[str, Any]:
    if any(part["count"] is None for part in parts):
        return _NOTHING
    filled = [part for part in parts if part["count"]]
    found: dict[str, Any] = {
        name: sum(part[name] for part in parts) for name in ("count", "nan_count", "inf_count")
    }
    for name, choose in (("min", min), ("max", max)):
        ends = [part[name] for part in filled]
        found[name] = (math.nan if any(map(math.isnan, ends)) else choose(ends)) if ends else None
    for name in ("sum", "sumsq", "sumabs", "sum4"):
        numbers = [part[name] for part in parts]
        found[name] = None if None in numbers else add_up(numbers)
    zeros = [part["zero_count"] for part in parts]
    found["zero_count"] = None if None in zeros else sum(zeros)
    return found


def _average(parts: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Returns the statistics of the mean of single numbers: the loss of a batch, say, of whose parts ranks have one."""
    if any(part["count"] is None for part in parts):
        return _NOTHING
    mean = add_up([part["sum"] for part in parts]) / len(parts)
    is_finite = math.isfinite(mean)
    return {
        **_merge_statistics(parts[:1]),
        **dict.fromkeys(("min", "max", "sum"), mean),
        **{name: None if parts[0][name] is None else abs(mean) ** power for name, power in _POWERS.items()},
        "nan_count": int(math.isnan(mean)),
        "inf_count": int(math.isinf(mean)),
        "zero_count": None if parts[0]["zero_count"] is None else int(mean == 0),
        "first_index": None if is_finite else 0,
        "histogram": None,
    }


#: The power of the magnitude that a sum is of.
_POWERS = {"sumabs": 1, "sumsq": 2, "sum4": 4}


def _first_index(parts: Sequence[dict[str, Any]]) -> int | None:
    places = []
    for part in parts:
        if part["first_index"] is not None:
            inside = np.unravel_index(part["first_index"], part["shape"])
            at = tuple(int(one) + start for one, start in zip(inside, part["global_offset"], strict=True))
            places.append(int(np.ravel_multi_index(at, part["global_shape"])))
    return min(places, default=None)


def _join_shapes(shapes: Sequence[Sequence[int]], degree: int) -> list[int]:
    """Returns the shape of parts of a batch, of which each may have parts of the features."""
    shape = [*shapes[0]]
    if not shape:
        return shape
    if len(shapes) % degree == 0 and degree < len(shapes) and {*map(tuple, shapes)} == {tuple(shape)}:
        shape[-1] *= len(shapes) // degree
        shape[0] *= degree
    else:
        shape[0] = sum(one[0] for one in shapes)
    return shape


def _merge_all(parts: Sequence[dict[str, Any]], name: str, merge: Any) -> Any:
    found = [part[name] for part in parts]
    return None if any(one is None for one in found) else merge(found)


def _add_hashes(hashes: Sequence[bytes]) -> bytes:
    return hash_to_bytes(merge_hashes(map(hash_from_bytes, hashes)))


# ---- Gradients of a mean.


def align_gradients(a: RecordingData, b: RecordingData) -> tuple[RecordingData, RecordingData, str | None]:
    """Scales gradients that are of the mean over a rank's part of the batch in only one of two runs.

    The loss of such a rank is `degree` times as steep in its part as the loss of the whole batch. Whether it is shows
    in the gradient that comes first.

    Returns:
        both runs, and a sentence if the gradients of one were divided.
    """
    degrees = [run.degree if isinstance(run, RanksData) else 1 for run in (a, b)]
    ratio = degrees[1] / degrees[0]
    sizes = [_first_gradient(run) for run in (a, b)] if ratio != 1 else []
    if not sizes or not sizes[0] or not np.isclose(sizes[1] / sizes[0], ratio, rtol=_SAME_RATIO):
        return a, b, None
    name, factor = ("second", ratio) if ratio > 1 else ("first", 1 / ratio)
    text = (
        f"gradients of activations: {factor:.4g} x in the {name} run, whose loss is a mean over the part of the batch "
        f"on each of its ranks; they are compared divided by {factor:.4g}"
    )
    return (a, _Scaled(b, factor), text) if ratio > 1 else (_Scaled(a, factor), b, text)


#: How exactly the first gradients have to be in the ratio of the degrees; the runs may differ a little.
_SAME_RATIO = 1e-2


def _first_gradient(run: RecordingData) -> float:
    """Returns the root mean square of the gradient of an activation that is measured first; 0 if there is none."""
    values = PlacedValues(data=run, table=run.table("values"))
    rows = np.flatnonzero(values.is_of(*_SCALED) & (values.numel > 1))  # that of a loss is 1
    if not len(rows):
        return 0.0
    first = rows[np.lexsort((values.moment[rows], values.step[rows]))[0]]
    return float(values.read_stats().rms[first])


class _Scaled:
    """A recording with its gradients of activations divided by a factor."""

    def __init__(self, data: RecordingData, factor: float) -> None:
        self._data, self._factor = data, factor
        self.tensor = data.tensor

    @property
    def meta(self) -> RunMeta:
        return self._data.meta

    def table(self, name: str) -> ArrowTable:
        return self._values if name == "values" else self._data.table(name)

    @cached_property
    def _values(self) -> ArrowTable:
        table = self._data.table("values")
        values = PlacedValues(data=self._data, table=table)
        in_backward = values.is_of(OP_OUTPUT) & (values.phase == PHASES.index(BACKWARD))
        is_scaled = (values.is_of(*_SCALED) | in_backward) & (values.numel > 1)
        for name, power in {"min": 1, "max": 1, "sum": 1, **_POWERS}.items():
            numbers = to_numpy(table[name], null=np.nan)
            scaled = np.where(is_scaled, numbers / self._factor**power, numbers)
            column = from_numpy(np.ma.masked_array(scaled, to_numpy(table[name].is_null())), pa.float64())
            table = table.set_column(table.schema.get_field_index(name), table.schema.field(name), column)
        is_kept = from_numpy(~is_scaled)
        for name in ("hash", "sketch", "sample", "histogram", "channel_max", "blob", "user"):
            field = table.schema.field(name)
            column = pc.if_else(is_kept, table[name], pa.scalar(None, field.type))
            table = table.set_column(table.schema.get_field_index(name), field, column)
        return table
