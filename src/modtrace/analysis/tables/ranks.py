"""Reads the recordings of several ranks as one: that of a run on a single device."""

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import combinations
from operator import itemgetter
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
from ...recording.suggestions import ranges_of
from .columns import ArrowTable, Bools, Column, Rows, count_before, dictionary_codes, find_rows
from .placement import NOWHERE, Placer
from .tensors import read_sizes
from .values import PlacedValues

#: The beginning of the note on the part of a DTensor whose place is not known. Where it is the whole note, the
#: recording is an old one, and has the numbers of the part beside the shape of the whole.
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


class StepOrder:
    """Finds which steps of several ranks are one: the n-th of its kind, as a rank may evaluate alone."""

    def __init__(self, data: RecordingData) -> None:
        steps = data.table("steps").select(["step", "kind"]).to_pylist()
        self._numbers: dict[int, tuple[int, int]] = {}
        counts = Counter[str]()
        for row in sorted(steps, key=itemgetter("step")):
            kind = row["kind"]
            is_training = kind == TRAIN
            self._numbers[row["step"]] = counts[kind], 2 * counts[TRAIN] + is_training
            counts[kind] += 1
        self._kinds = {row["step"]: _KINDS.get(row["kind"], len(_KINDS)) for row in steps}
        self._trained = counts[TRAIN]

    def identify(self, step: int) -> int:
        """Returns a number that the step has on all ranks; a step that has not ended is paired by its own number."""
        if step not in self._kinds:
            return step * 4 + 3
        return self._numbers[step][0] * 4 + self._kinds[step]

    def place(self, step: int) -> int:
        """Returns where the step stands among the training steps, as on all ranks."""
        return self._numbers[step][1] if step in self._numbers else 2 * self._trained + 1


TRAIN = "train"
_KINDS = {TRAIN: 0, "eval": 1}


class RanksData:
    """The `RecordingData` of several ranks together. What is not measured is read from the lowest of them.

    Of rows of `values` with equal site, offset and shape only that of the lowest rank counts; the others are its
    copies. The parts of a DTensor become the whole, exactly but for its sums (docs/ranks.md). Tensors that differ from
    rank to rank and are no DTensors are parts of one too: of a batch, or of the features.
    """

    def __init__(self, ranks: Sequence[tuple[int, RecordingData]], missing: Sequence[int] = ()) -> None:
        """Holds the ranks, at least one, with their numbers in ascending order; `missing` have no folder."""
        measured = [(rank, data) for rank, data in ranks if data.table("values").num_rows]
        self.ranks = measured or ranks[:1]
        self._marks = [
            f"rank {rank}: nothing was measured" for rank, _ in ranks if rank not in dict(self.ranks)
        ]
        if missing:
            self._marks.append(f"ranks of the run are missing: {ranges_of(missing)}")
        self._lowest = self.ranks[0][1]

    @cached_property
    def meta(self) -> RunMeta:
        """The description of the lowest rank's run, with the marks of all."""
        marks = [f"rank {rank}: {mark}" for rank, data in self.ranks for mark in data.meta.marks]
        marks += [*self._marks, *filter(None, (self._merged.lacking,))]
        return replace(self._lowest.meta, rank=ALL_RANKS, marks=tuple(marks), complete=not marks)

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
        steps, which = np.unique(values.step, return_inverse=True)
        order = StepOrder(values.data)
        step = np.array([order.identify(number) for number in steps.tolist()], np.int64)[which.reshape(-1)]
        keys.append(np.stack([step, values.phase, site], axis=1).astype(np.int64))
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
    """Yields what names each site on all ranks, and in other runs: an only root may be wrapped there."""
    placer = Placer(values.data)
    sites = values.data.table("sites").to_pylist()
    places = [
        NOWHERE if row["module_id"] is None else placer.place(row["module_id"], NOWHERE) for row in sites
    ]
    names = placer.name_modules()
    has_roots = len({name.root for name in names}) > 1
    for row, place in zip(sites, places, strict=True):
        name = None if place == NOWHERE else (names[place].root if has_roots else "", names[place].path)
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
    several = np.flatnonzero((counts.sum(axis=0) > 1) | ((degree > 1) & lowest.placed.is_of(*_BATCHED)))
    is_part = to_numpy(tables[0]["global_shape"].is_valid())
    changed = np.unique(np.concatenate([several, np.flatnonzero(is_part | find_unread(tables[0]))]))
    if not len(changed):
        return _Merged(tables[0], degree, sentence)
    are_gradients = lowest.placed.is_of(PARAMETER_GRAD) & _find_batched(lowest.placed)
    kinds = np.where(are_gradients, _GRADIENT, np.where(_find_batched(lowest.placed), _ACTIVATION, _WEIGHT))
    merged = _merge_rows(
        tables, [of_rank[changed] for of_rank in rows], counts[:, changed], degree, kinds[changed]
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
    numbers[rows] = mix_columns(sizes) | 1
    return numbers


def mix_columns(columns: Column) -> Rows:
    """Returns a number for each row of a matrix of integers; equal rows have equal ones (FNV-1a, of whole numbers)."""
    mixed = np.full(len(columns), 0xCBF29CE484222325, np.uint64)
    for column in columns.T:
        mixed = (mixed ^ column.astype(np.uint64)) * np.uint64(0x100000001B3)
        mixed ^= mixed >> np.uint64(29)  # the product alone hands on no bit to lower ones
    return mixed.view(np.int64)


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
    is_old = np.array([*(text.startswith(OLD_NOTE) for text in notes), False])
    return np.asarray(is_partial[placement] | is_old[note])


def _degree(lowest: RankValues, counts: Column) -> int:
    """Returns into how many parts the batch is divided: as many as most outputs have that are no DTensors."""
    values = lowest.placed
    is_plain = values.is_of(OUTPUT) & ~to_numpy(values.table["global_shape"].is_valid()) & (values.numel > 1)
    found = Counter(counts[:, is_plain].sum(axis=0).tolist()).most_common(1)
    return int(found[0][0]) if found else 1


#: What a merged tensor is of: something of the model, of the batch, or a gradient of which ranks have summands.
_WEIGHT, _ACTIVATION, _GRADIENT = range(3)


def _merge_rows(
    tables: Sequence[ArrowTable], rows: Sequence[Rows], counts: Column, degree: int, kinds: Column
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
        _merge_parts([of_rank[row] for of_rank, mine in parts if mine[row]], degree, kind)
        for row, kind in enumerate(kinds.tolist())
    ]
    columns = [from_list([row.get(field.name) for row in merged], field.type) for field in schema]
    return pa.Table.from_arrays(columns, schema=schema)


def _merge_parts(parts: Sequence[dict[str, Any]], degree: int, kind: int) -> dict[str, Any]:
    """Returns the row of a tensor, given those of its parts without copies.

    Args:
        parts: the rows.
        degree: into how many parts the batch is divided.
        kind: what the tensor is of.
    """
    row = dict(parts[0])
    whole, reason = row["global_shape"], None
    # An activation on several meshes is of several parts of the batch.
    meshes = len({part["mesh"] for part in parts}) if kind == _ACTIVATION else 1
    if whole is not None:
        row["shape"] = [size * meshes if at == 0 else size for at, size in enumerate(whole)]
        row["global_shape"], row["global_offset"] = row["shape"], [0] * len(whole)
        row["numel"] = math.prod(row["shape"])
    if (row["note"] or "").startswith(OLD_NOTE):
        reason = "the part of a DTensor, recorded without its place"
    elif _PARTIAL in (row["placements"] or ""):
        reason = f"a partial sum ({row['placements']}) that is not reduced yet"
    elif kind == _GRADIENT and len(parts) > 1:
        reason = "the gradient of a part of the batch, before it is reduced"
    elif whole is not None and sum(math.prod(part["shape"]) for part in parts) != row["numel"]:
        reason = "parts of it are on ranks that are not read, or lack this row"
    elif kind == _ACTIVATION and whole is None and row["shape"] and len(parts) % degree:
        reason = "equal on ranks that have other parts of the batch: copies or parts"
    if reason is not None:
        return {**row, **_NOTHING, "note": f"not comparable: {reason}"}
    if len(parts) == 1:
        return row
    if not row["shape"] and whole is None:
        return {**row, **dict.fromkeys((*_OF_ONE_PART, "hash", "sketch")), **_average(parts)}
    if whole is None:
        row["shape"] = _join_shapes([part["shape"] for part in parts], degree)
        row["numel"] = sum(part["numel"] for part in parts)
    row.update(dict.fromkeys(_OF_ONE_PART))
    row.update(_merge_statistics(parts), note=next((part["note"] for part in parts if part["note"]), None))
    is_whole = whole is not None and meshes == 1
    if row["nan_count"] or row["inf_count"]:
        row["first_index"] = _first_index(parts) if is_whole else None
    row["hash"] = _merge_all(parts, "hash", _add_hashes) if is_whole else None
    row["sketch"] = _merge_all(parts, "sketch", _add_sketches) if is_whole else None
    row["histogram"] = _merge_all(parts, "histogram", lambda found: np.sum(found, axis=0).tolist())
    return row


_NOTHING: dict[str, Any] = {
    **dict.fromkeys(
        (*RAW, *_OF_ONE_PART, "first_index", "sumabs", "zero_count", "sum4", "hash", "sketch", "histogram")
    ),
    "nan_count": 0,
    "inf_count": 0,
}


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


def _add_sketches(sketches: Sequence[Sequence[float]]) -> list[float]:
    found: list[float] = merge_sketches(sketches).tolist()
    return found


def _add_hashes(hashes: Sequence[bytes]) -> bytes:
    return hash_to_bytes(merge_hashes(map(hash_from_bytes, hashes)))


# ---- Gradients of a mean.


class GradientFactors(NamedTuple):
    """What makes gradients of two runs comparable."""

    factors: tuple[float, float]  # by which those of the first and of the second run are divided
    text: str | None  # a sentence if one is not 1


def align_gradients(a: RecordingData, b: RecordingData) -> GradientFactors:
    """Returns by what the gradients of activations are to be divided, if they are of a mean over a part of the batch.

    The loss of a rank is then `degree` times as steep in its part as the loss of the whole batch. Whether it is shows
    in the median ratio of the gradients.
    """
    degrees = [run.degree if isinstance(run, RanksData) else 1 for run in (a, b)]
    ratio = degrees[1] / degrees[0]
    if ratio == 1 or not np.isclose(_median_ratio(a, b), ratio, rtol=_SAME_RATIO):
        return GradientFactors((1.0, 1.0), None)
    name, factor = ("second", ratio) if ratio > 1 else ("first", 1 / ratio)
    text = (
        f"gradients of activations: {factor:.4g} x in the {name} run, whose loss is a mean over the part of the batch "
        f"on each of its ranks; they are compared divided by {factor:.4g}"
    )
    return GradientFactors((1.0, factor) if ratio > 1 else (factor, 1.0), text)


#: How exactly the gradients have to be in the ratio of the degrees; the runs may differ a little.
_SAME_RATIO = 1e-2


def _median_ratio(a: RecordingData, b: RecordingData) -> float:
    """Returns the median ratio of the norms of the gradients of activations in two runs; NaN if there are none."""
    one, other = read_rank_values([(0, a), (1, b)])
    at = find_rows(other.key, one.key)
    rows = np.flatnonzero(
        one.placed.is_of(*_SCALED) & (one.placed.numel > 1) & (at >= 0)
    )  # that of a loss is 1
    if not len(rows):
        return math.nan
    with np.errstate(all="ignore"):
        ratios = other.placed.read_stats().l2[at[rows]] / one.placed.read_stats().l2[rows]
    known = ratios[np.isfinite(ratios)]
    return float(np.median(known)) if len(known) else math.nan


def scale_gradients(data: RecordingData, factor: float) -> RecordingData:
    """Returns a recording with its gradients of activations divided by a factor."""
    return data if factor == 1 else _Scaled(data, factor)


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
