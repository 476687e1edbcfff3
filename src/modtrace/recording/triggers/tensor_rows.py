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
        self._last_use: dict[int, int] = {}  # for tensors of earlier steps, the last step that refers to them

    @property
    def columns(self) -> list[Columns]:
        """The rows, oldest first."""
        return [chunk.columns for chunk in self._chunks]

    def see(self, step: int, batches: Iterable[Batch]) -> None:
        """Records the tensors of earlier steps to which a step refers."""
        used = [columns["tensor_id"] for table, columns in batches if table == "uses"]
        own = [columns["tensor_id"] for table, columns in batches if table == "tensors"]
        if used:
            earlier = np.setdiff1d(_joined(used), _joined(own))
            self._last_use.update(dict.fromkeys(earlier.tolist(), step))

    def drop(self, step: int, batches: Iterable[Batch], *, is_replaced: bool = True) -> None:
        """Drops the oldest step, except for rows to which a later step may refer.

        Args:
            step: the number of the step.
            batches: the rows of the step.
            is_replaced: whether all rows of the step that replaces it were received. If not, that step may refer to any
                row.
        """
        self._chunks += [_chunk(columns) for table, columns in batches if table == "tensors"]
        self._last_use = {tensor: last for tensor, last in self._last_use.items() if last > step}
        if is_replaced and self._chunks:
            self._prune()
        else:
            self.size_bytes = sum(chunk.size_bytes for chunk in self._chunks)

    def take(self) -> list[Columns]:
        """Returns the rows to which held steps refer, and drops them, because they are about to be written.

        Rows of tensors that these steps saw first are written with the steps themselves.
        """
        are_used = [np.isin(chunk.tensor_id, self._used()) for chunk in self._chunks]
        written = [chunk.only(used) for chunk, used in zip(self._chunks, are_used, strict=True)]
        self._keep([~used for used in are_used])
        self._last_use = {}
        return [chunk.columns for chunk in written if len(chunk.tensor_id)]

    def _prune(self) -> None:
        site = np.concatenate([chunk.site_id for chunk in self._chunks])
        last = last_of_each(site)
        is_wanted = np.isin(np.concatenate([chunk.tensor_id for chunk in self._chunks]), self._used())
        is_wanted[last[site[last] != _NO_SITE]] = True
        ends = np.cumsum([len(chunk.site_id) for chunk in self._chunks])[:-1]
        self._keep(np.split(is_wanted, ends))

    def _used(self) -> _Ids:
        return np.fromiter(self._last_use, np.int64, len(self._last_use))

    def _keep(self, are_wanted: Iterable[npt.NDArray[np.bool_]]) -> None:
        """Keeps the wanted rows of each chunk, and drops the others."""
        parts = [chunk.only(wanted) for chunk, wanted in zip(self._chunks, are_wanted, strict=True)]
        self._chunks = [chunk for chunk in parts if len(chunk.tensor_id)]
        self.size_bytes = sum(chunk.size_bytes for chunk in self._chunks)


class _Chunk(NamedTuple):
    """Rows of one step."""

    columns: Columns
    tensor_id: _Ids
    site_id: _Ids
    size_bytes: int

    def only(self, wanted: npt.NDArray[np.bool_]) -> "_Chunk":
        """Returns a selection of the rows, which is copied unless it contains all."""
        if wanted.all():
            return self
        rows = from_numpy(np.flatnonzero(wanted), pa.int64())
        return _chunk({name: column.take(rows) for name, column in self.columns.items()})


def _chunk(columns: Columns) -> _Chunk:
    site = columns.get("site_id")
    ids = to_numpy(columns["tensor_id"])
    sites = np.full(len(ids), _NO_SITE) if site is None else to_numpy(site, null=_NO_SITE).astype(np.int64)
    return _Chunk(columns, ids, sites, sum(column.get_total_buffer_size() for column in columns.values()))


def _joined(arrays: Sequence[pa.Array]) -> _Ids:
    return np.concatenate([np.zeros(0, np.int64), *(to_numpy(array) for array in arrays)])
