"""Reads the measurements of chosen rows of `values` as columns."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from ...recording.arrow.arrays import from_numpy, to_numpy
from ...recording.protocols import RecordingData
from ...recording.raw_tensor import RawTensor
from ...recording.statistics.fingerprints import HASH_SIZE, SKETCH_SIZE
from ...recording.statistics.moments import RAW, Numbers, StatColumns, read_statistics
from .columns import Bools, Column, Rows, column_of, dictionary_codes
from .tensors import Sizes, read_sizes

#: Below this number of rows, all columns are taken at once.
_FEW = 100

_COLUMNS = ("shape", "dtype", "numel", *RAW)


@dataclass(frozen=True, kw_only=True, eq=False)
class ComparedRows:
    """The measurements of chosen rows of `values`, in the given order; a row may occur several times."""

    data: RecordingData
    rows: Rows
    sizes: Sizes  # the shapes of the tensors
    numel: Column
    dtype: Column  # codes of `dtypes`, the names of the dtypes
    dtypes: tuple[str, ...]
    stats: StatColumns
    is_measured: Bools
    hash: npt.NDArray[np.uint64]  # 0 where no hash was recorded
    has_hash: Bools
    has_sketch: Bools
    has_sample: Bools
    has_tensor: Bools

    def __len__(self) -> int:
        return len(self.rows)

    def shape(self, at: int) -> list[int]:
        """Returns the shape of the tensor in row `at`."""
        return [size for size in self.sizes[at].tolist() if size >= 0]

    def matrices(self) -> tuple[Bools, Column, Column]:
        """Returns which tensors have two dimensions, and their numbers of rows and columns."""
        wide = np.pad(self.sizes, ((0, 0), (0, 3)), constant_values=-1)
        return (wide[:, 1] >= 0) & (wide[:, 2] < 0), wide[:, 0], wide[:, 1]

    def sketches(self, at: Rows) -> Numbers:
        """Returns the sketches of rows that all have one, as a matrix `[len(at), 64]`."""
        return lists_of(self.data.table("values")["sketch"], self.rows[at], SKETCH_SIZE)

    def sample(self, at: int) -> Numbers:
        """Returns the sample of the tensor in row `at`."""
        found = self.data.table("values")["sample"][int(self.rows[at])].as_py()
        return np.array(found, np.float64)

    def tensor(self, at: int) -> RawTensor:
        """Returns the whole tensor of row `at`.

        Raises:
            RecordingError: the tensor cannot be read.
        """
        return self.data.tensor(self.data.table("values")["blob"][int(self.rows[at])].as_py())


def read_measured(data: RecordingData, rows: Rows) -> ComparedRows:
    """Returns the measurements of chosen rows of `values`."""
    values = data.table("values")
    # Taking long lists of many rows would copy them all, so they are read later, when needed.
    if len(rows) < _FEW:
        table = columns = pa.concat_tables(
            [values.slice(row, 1) for row in rows.tolist()] or [values.slice(0, 0)]
        )
        at = np.arange(len(rows))
    else:
        table, columns, at = values.select(_COLUMNS).take(from_numpy(rows, pa.int64())), values, rows
    dtype, dtypes = dictionary_codes(table["dtype"])
    hashes, has_hash = _read_hashes(columns["hash"])
    return ComparedRows(
        data=data,
        rows=rows,
        sizes=read_sizes(table["shape"]),
        numel=column_of(table, "numel"),
        dtype=dtype,
        dtypes=dtypes,
        stats=read_statistics(table),
        is_measured=to_numpy(table["count"].is_valid()),
        hash=hashes[at],
        has_hash=has_hash[at],
        has_sketch=_has(columns["sketch"], pc.list_value_length, SKETCH_SIZE)[at],
        has_sample=to_numpy(columns["sample"].is_valid())[at],
        has_tensor=to_numpy(columns["blob"].is_valid())[at],
    )


def _has(column: pa.ChunkedArray, measure: Callable[[Any], Any], size: int) -> Bools:
    if column.null_count == len(column):
        return np.zeros(len(column), bool)
    return np.asarray(to_numpy(measure(column), null=0) == size)


def _read_hashes(column: pa.ChunkedArray) -> tuple[npt.NDArray[np.uint64], Bools]:
    hashes = np.zeros(len(column), np.uint64)
    has_one = _has(column, pc.binary_length, HASH_SIZE)
    at = 0
    for chunk in column.chunks:
        there = has_one[at : at + len(chunk)]
        if there.any():
            content = pa.concat_arrays([chunk.filter(from_numpy(there))])
            whole = np.frombuffer(content.buffers()[2], np.uint8)
            start = np.frombuffer(content.buffers()[1], np.int32)[content.offset]
            hashes[at : at + len(chunk)][there] = whole[start : start + HASH_SIZE * len(content)].view("<u8")
        at += len(chunk)
    return hashes, has_one


def lists_of(column: pa.ChunkedArray, rows: Rows, size: int) -> Numbers:
    """Returns the lists in some rows of a column as a matrix; all have the length `size`."""
    found = np.empty((len(rows), size))
    ends = np.cumsum([len(chunk) for chunk in column.chunks])
    of_chunk = np.searchsorted(ends, rows, side="right")
    for number in np.unique(of_chunk).tolist():
        chunk, mine = column.chunks[number], np.flatnonzero(of_chunk == number)
        starts = to_numpy(chunk.offsets)[rows[mine] - (ends[number] - len(chunk))]
        found[mine] = to_numpy(chunk.values, null=np.nan)[starts[:, None] + np.arange(size)]
    return found
