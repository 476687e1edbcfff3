"""Merges the rows that several ranks have of one tensor: of its shards, or of parts of a batch."""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import pyarrow as pa

from ...recording.arrow.arrays import from_list, from_numpy
from ...recording.statistics.fingerprints import (
    hash_from_bytes,
    hash_to_bytes,
    merge_hashes,
    merge_sketches,
)
from ...recording.statistics.moments import RAW, add_up
from .columns import ArrowTable, Column, Rows
from .rank_values import OLD_NOTE, PARTIAL

#: Columns that merged rows need, also where they are null.
_NEEDED = ("count", "note", "placements", "mesh", "global_shape", "global_offset", "sumabs", "sum4", "zero_count",
           "first_index", "hash", "sketch", "histogram")  # fmt: skip

#: Columns that cannot be merged from those of parts.
_OF_ONE_PART = ("argmax", "channel_max", "sample", "user", "blob")

#: What a merged tensor is of: something of the model, of the batch, or a gradient of which ranks have summands.
WEIGHT, ACTIVATION, GRADIENT = range(3)


#: At most this many rows are taken apart at a time: of 8 ranks, some 200 MB of Python's numbers and lists.
_AT_A_TIME = 20_000


def merge_rows(
    tables: Sequence[ArrowTable], rows: Sequence[Rows], counts: Column, degrees: Rows, kinds: Column
) -> ArrowTable:
    """Returns one row for each tensor, in the schema of the tables, merged from those that ranks have of it.

    Args:
        tables: `values` of each rank, the lowest first.
        rows: for each rank, its row of each tensor; -1 for none.
        counts: `counts[rank, tensor]` is False for a replica of a lower rank's, and where there is no row.
        degrees: into how many parts the batch is divided of which the ranks have the tensor.
        kinds: WEIGHT, ACTIVATION or GRADIENT of each tensor.
    """
    schema = tables[0].schema
    used = [
        field.name for field in schema if any(table[field.name].null_count < len(table) for table in tables)
    ]
    needed = [
        *dict.fromkeys([*used, *_NEEDED])
    ]  # taking apart a column of nulls would be the most of the work
    batches = []
    for first in range(0, len(kinds), _AT_A_TIME):
        here = slice(first, first + _AT_A_TIME)
        parts = [
            table.select(needed).take(from_numpy(np.maximum(at[here], 0))).to_pylist()
            for table, at in zip(tables, rows, strict=True)
        ]
        merged = [
            _merge_parts(
                [of_rank[row] for of_rank, is_part in zip(parts, mine, strict=True) if is_part], degree, kind
            )
            for row, (mine, degree, kind) in enumerate(
                zip(counts[:, here].T.tolist(), degrees[here].tolist(), kinds[here].tolist(), strict=True)
            )
        ]
        columns = [from_list([row.get(field.name) for row in merged], field.type) for field in schema]
        batches.append(pa.Table.from_arrays(columns, schema=schema))
    return pa.concat_tables(batches) if batches else schema.empty_table()


def _merge_parts(parts: Sequence[dict[str, Any]], degree: int, kind: int) -> dict[str, Any]:
    """Returns the row of a tensor, given those of its parts without replicas.

    Args:
        parts: the rows.
        degree: into how many parts the batch is divided.
        kind: what the tensor is of.
    """
    row = dict(parts[0])
    whole, reason = row["global_shape"], None
    # An activation on several meshes is of several parts of the batch.
    meshes = len({part["mesh"] for part in parts}) if kind == ACTIVATION else 1
    if whole is not None:
        row["shape"] = [size * meshes if at == 0 else size for at, size in enumerate(whole)]
        row["global_shape"], row["global_offset"] = row["shape"], [0] * len(whole)
        row["numel"] = math.prod(row["shape"])
    if (row["note"] or "").startswith(OLD_NOTE):
        reason = "the part of a DTensor, recorded without its place"
    elif PARTIAL in (row["placements"] or ""):
        reason = f"a partial sum ({row['placements']}) that is not reduced yet"
    elif kind == GRADIENT and len(parts) > 1:
        reason = "the gradient of a part of the batch, before it is reduced"
    elif whole is not None and sum(math.prod(part["shape"]) for part in parts) != row["numel"]:
        reason = "parts of it are on ranks that are not read, or lack this row"
    elif len({len(part["shape"]) for part in parts}) > 1:
        reason = "other ranks have a tensor with another number of dimensions here"
    elif (
        kind == ACTIVATION
        and whole is None
        and row["shape"]
        and row["count"] is not None
        and len(parts) % degree
    ):
        reason = "equal on ranks that have other parts of the batch: replicas or parts"
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
        if not ends or None in ends:
            found[name] = None
        else:
            found[name] = math.nan if any(map(math.isnan, ends)) else choose(ends)
    for name in ("sum", "sumsq", "sumabs", "sum4"):
        numbers = [part[name] for part in parts]
        found[name] = None if None in numbers else add_up(numbers)
    zeros = [part["zero_count"] for part in parts]
    found["zero_count"] = None if None in zeros else sum(zeros)
    return found


def _average(parts: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Returns the statistics of the mean over ranks of a tensor of one element, such as the loss of each part."""
    if any(part["count"] is None or part["sum"] is None for part in parts):
        return _NOTHING
    mean = add_up([part["sum"] for part in parts]) / len(parts)
    is_finite = math.isfinite(mean)
    with np.errstate(over="ignore"):  # a power may be infinite
        powers = {name: float(np.float64(abs(mean)) ** power) for name, power in POWERS.items()}
    return {
        **_merge_statistics(parts[:1]),
        **dict.fromkeys(("min", "max", "sum"), mean),
        **{name: None if parts[0][name] is None else powers[name] for name in POWERS},
        "nan_count": int(math.isnan(mean)),
        "inf_count": int(math.isinf(mean)),
        "zero_count": None if parts[0]["zero_count"] is None else int(mean == 0),
        "first_index": None if is_finite else 0,
        "histogram": None,
    }


#: The power of the magnitude that a sum is of.
POWERS = {"sumabs": 1, "sumsq": 2, "sum4": 4}


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
