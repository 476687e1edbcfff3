"""Writes an existing recording, in memory or in another folder, to a folder."""

import os

from ..errors import RecordingError
from ..recording.in_memory.tensors import is_reference, with_blobs
from ..recording.protocols import RecordingData
from ..recording.schema import schemas
from .reader import FolderReader
from .stream import LARGE_BATCH_ROWS
from .writer import FolderWriter

_NOT_CLOSED = "copied before the recording was closed"


def write_recording(data: RecordingData, path: str | os.PathLike[str], *, overwrite: bool = False) -> None:
    """Writes a copy of `data`, with its whole tensors, to the folder `path`.

    Args:
        data: the recording. With `overwrite` it may be in `path` itself.
        path: as for `FolderWriter`.
        overwrite: replaces a recording in `path`.

    Raises:
        RecordingExistsError: `path` exists already.
        RecordingError: it cannot be written.
    """
    meta = data.meta
    tables = {name: data.table(name) for name in schemas()}
    if isinstance(data, FolderReader):
        data.hold_tensors()
    writer = FolderWriter(path, meta, overwrite=overwrite, strict=True)
    try:
        tensors = _TensorCopier(data, writer)
        tables["values"] = with_blobs(tables["values"], tensors.copy)
        for name, table in tables.items():
            for batch in table.to_batches(max_chunksize=LARGE_BATCH_ROWS):
                writer.write(name, dict(zip(table.column_names, batch.columns, strict=True)))
                writer.end_step(0)  # writes if there are many rows
        if not meta.complete and not meta.marks:
            writer.mark(_NOT_CLOSED)
        tensors.mark_missing()
    finally:
        writer.close()


class _TensorCopier:
    """Copies whole tensors one by one, and counts those that cannot be read."""

    def __init__(self, data: RecordingData, writer: FolderWriter) -> None:
        self._data = data
        self._writer = writer
        self._missing = 0
        self._why = ""

    def copy(self, blob: str, step: int) -> str | None:
        """Returns the reference in the copy; None if there is none.

        A text that is no reference is returned unchanged.
        """
        if not is_reference(blob):
            return blob
        try:
            raw = self._data.tensor(blob)
        except RecordingError as error:
            self._missing += 1
            self._why = self._why or str(error)
            return None
        name = blob.partition(":")[2].partition(".")[2]  # it gets a new number
        return self._writer.put_tensor(name, raw.to_numpy(), raw.dtype, raw.shape, step=step)

    def mark_missing(self) -> None:
        """Marks in the copy which tensors are missing."""
        if self._missing:
            self._writer.mark(f"{self._missing} whole tensors could not be copied: {self._why}")
