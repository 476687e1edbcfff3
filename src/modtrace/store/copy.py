"""Writes a recording that is there already, in memory or in another folder, to a folder."""

import os

from ..recording.protocols import RecordingData
from ..recording.schema import schemas
from .compact import LARGE_BATCH_ROWS
from .writer import FolderWriter

_NOT_CLOSED = "copied before the recording was closed"


def write_recording(data: RecordingData, path: str | os.PathLike[str], *, overwrite: bool = False) -> None:
    """Writes a copy of `data` to the folder `path`.

    Args:
        data: the recording; one that lies in `path` itself may be given, with `overwrite`.
        path: as of `FolderWriter`.
        overwrite: replace a recording that is there.

    Raises:
        RecordingExistsError: something is there already.
        RecordingError: it cannot be written.
    """
    meta = data.meta
    tables = {name: data.table(name) for name in schemas()}
    writer = FolderWriter(path, meta, overwrite=overwrite, strict=True)
    try:
        for name, table in tables.items():
            for batch in table.to_batches(max_chunksize=LARGE_BATCH_ROWS):
                writer.write(name, dict(zip(table.column_names, batch.columns, strict=True)))
                writer.end_step(0)  # writes when much has gathered
        if not meta.complete and not meta.marks:
            writer.mark(_NOT_CLOSED)
    finally:
        writer.close()
