"""Holds rows of `tensors` longer than their step, because later steps may refer to them."""

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from ..arrow.arrays import from_numpy, last_of_each, to_numpy

_Ids = npt.NDArray[np.int64]

Columns = Mapping[str, pa.Array]

#: The name of a table, and some of its rows.
Batch = tuple[str, Columns]

_NO_SITE = -1
_NO_IDS = np.empty(0, np.int64)


class TensorRows:
    """Rows of `tensors` from steps that were dropped.

    A tensor has one row, in the step in which it was first seen, while a frozen parameter, a cached mask or a carried
    state is read in every later step. Two kinds of rows are kept: those to which a held step refers, and the last one
    of each site (a parameter, a buffer, an input), to which a step may yet refer. So there are never more of them than
    uses in the held steps, plus sites. If no held step refers to the output of an op, but a later step reads it, it has
    no row, and its producer is unknown, as for what ran before the recording.
    """

    def __init__(self) -> None:
        self.size_bytes = 0
        self._chunks: list[_Chunk] = []  # oldest first
        self._rows = 0
        self._last_use: dict[int, int] = {}  # for tensors of earlier steps, the last step that refers to them
        self._used: dict[int, _Ids] = {}  # by held step, the tensors of earlier steps to which it refers
        self._changes = 0  # what may have made a row of `_chunks` unwanted since they were last pruned

    @property
    def columns(self) -> list[Columns]:
        """The rows, oldest first."""
        return [chunk.columns for chunk in self._chunks]

    def see(self, step: int, batches: Iterable[Batch]) -> None:
        """Records the tensors of earlier steps to which a step refers."""
        used = [columns["tensor_id"] for table, columns in batches if table == "uses"]
        own = [columns["tensor_id"] for table, columns in batches if table == "tensors"]
        if used:
            self._used[step] = np.setdiff1d(_joined(used), _joined(own))
            self._last_use.update(dict.fromkeys(self._used[step].tolist(), step))

    def drop(self, step: int, batches: Iterable[Batch], *, is_replaced: bool = True) -> None:
        """Drops the oldest step, except for rows to which a later step may refer.

        Args:
            step: the number of the step.
            batches: the rows of the step.
            is_replaced: whether all rows of the step that replaces it were received. If not, that step may refer to any
                row.
        """
        for tensor in self._used.pop(step, _NO_IDS).tolist():
            if self._last_use[tensor] == step:
                del self._last_use[tensor]
                self._changes += 1
        dropped = [_chunk(columns) for table, columns in batches if table == "tensors"]
        self._add(
            self._wanted(dropped)
            if is_replaced
            else _only(dropped, [np.ones(chunk.rows, bool) for chunk in dropped])
        )
        self._changes += sum(chunk.sites if is_replaced else chunk.rows for chunk in dropped)
        if is_replaced and 2 * self._changes >= self._rows:
            self._replace(self._wanted(self._chunks))

    def take(self) -> list[Columns]:
        """Returns the rows to which held steps refer, and drops them, because they are about to be written.

        Rows of tensors that these steps saw first are written with the steps themselves.
        """
        are_used = [self._are_used(chunk) for chunk in self._chunks]
        written = _only(self._chunks, are_used)
        self._replace(_only(self._chunks, [~used for used in are_used]))
        self._last_use, self._used = {}, {}
        return [chunk.columns for chunk in written]

    def _replace(self, chunks: "list[_Chunk]") -> None:
        self._chunks, self._rows, self._changes, self.size_bytes = [], 0, 0, 0
        self._add(chunks)

    def _add(self, chunks: "list[_Chunk]") -> None:
        self._chunks += chunks
        self._rows += sum(chunk.rows for chunk in chunks)
        self.size_bytes += sum(chunk.size_bytes for chunk in chunks)

    def _wanted(self, chunks: "list[_Chunk]") -> "list[_Chunk]":
        """Returns the rows of the newest chunks to which a held step refers, or a later one may refer."""
        if not chunks:
            return chunks
        site = np.concatenate([chunk.site_id for chunk in chunks])
        last = last_of_each(site)
        is_wanted = np.concatenate([self._are_used(chunk) for chunk in chunks])
        is_wanted[last[site[last] != _NO_SITE]] = True
        ends = np.cumsum([len(chunk.site_id) for chunk in chunks])[:-1]
        return _only(chunks, np.split(is_wanted, ends))

    def _are_used(self, chunk: "_Chunk") -> npt.NDArray[np.bool_]:
        """Returns for each row whether a held step refers to it."""
        used = map(self._last_use.__contains__, chunk.tensor_id.tolist())
        return np.fromiter(used, bool, chunk.rows)


def _only(chunks: "Sequence[_Chunk]", are_wanted: "Sequence[npt.NDArray[np.bool_]]") -> "list[_Chunk]":
    """Returns the wanted rows of each chunk, without chunks that have none."""
    return [chunk.only(wanted) for chunk, wanted in zip(chunks, are_wanted, strict=True) if wanted.any()]


class _Chunk(NamedTuple):
    """Rows of one step."""

    columns: Columns
    tensor_id: _Ids
    site_id: _Ids
    size_bytes: int

    @property
    def rows(self) -> int:
        return len(self.tensor_id)

    @property
    def sites(self) -> int:
        return int(np.count_nonzero(self.site_id != _NO_SITE))

    def only(self, wanted: npt.NDArray[np.bool_]) -> "_Chunk":
        """Returns a copy of the wanted rows, which may be a part of a larger batch."""
        rows = from_numpy(np.flatnonzero(wanted), pa.int64())
        batch = pa.RecordBatch.from_arrays(list(self.columns.values()), names=list(self.columns))
        return _chunk(dict(zip(self.columns, batch.take(rows).columns, strict=True)))


def _chunk(columns: Columns) -> _Chunk:
    site = columns.get("site_id")
    ids = to_numpy(columns["tensor_id"])
    sites = np.full(len(ids), _NO_SITE) if site is None else to_numpy(site, null=_NO_SITE).astype(np.int64)
    return _Chunk(columns, ids, sites, sum(column.get_total_buffer_size() for column in columns.values()))


def _joined(arrays: Sequence[pa.Array]) -> _Ids:
    return np.concatenate([np.zeros(0, np.int64), *(to_numpy(array) for array in arrays)])
