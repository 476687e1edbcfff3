"""Writes an existing recording, in memory or in another folder, to a folder."""

import os
import re
from collections.abc import Sequence

import pyarrow as pa

from ..errors import RecordingError
from ..recording.arrow.arrays import from_strings
from ..recording.in_memory.tensors import IN_MEMORY
from ..recording.protocols import RecordingData
from ..recording.schema import schemas
from .reader import FolderReader
from .stream import LARGE_BATCH_ROWS
from .writer import FolderWriter

_NOT_CLOSED = "copied before the recording was closed"

#: A reference to a tensor, as a sink returned it: `FILE:NUMBER.NAME`.
_REFERENCE = re.compile(rf"({IN_MEMORY}|tensors-\d{{5,}}\.safetensors):\d{{6,}}\..*", re.DOTALL)


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
        tables["values"], why_missing = _copy_tensors(data, tables["values"], writer)
        for name, table in tables.items():
            for batch in table.to_batches(max_chunksize=LARGE_BATCH_ROWS):
                writer.write(name, dict(zip(table.column_names, batch.columns, strict=True)))
                writer.end_step(0)  # writes if there are many rows
        if not meta.complete and not meta.marks:
            writer.mark(_NOT_CLOSED)
        if why_missing:
            writer.mark(f"{len(why_missing)} whole tensors could not be copied: {why_missing[0]}")
    finally:
        writer.close()


def _copy_tensors(
    data: RecordingData, values: pa.Table, writer: FolderWriter
) -> tuple[pa.Table, Sequence[str]]:
    """Copies the whole tensors one by one, and returns the rows with their references in the copy.

    A text that is no reference stays. The second result lists why tensors that cannot be read are missing.
    """
    if values["blob"].null_count == values.num_rows:
        return values, ()
    references = values["blob"].to_pylist()
    copied: dict[str | None, str | None] = {None: None}
    why_missing: list[str] = []
    for blob, step in zip(references, values["step"].to_pylist(), strict=True):
        if blob in copied:
            continue
        copied[blob] = blob
        if _REFERENCE.fullmatch(blob):
            try:
                raw = data.tensor(blob)
            except RecordingError as error:
                copied[blob] = None
                why_missing.append(str(error))
                continue
            name = blob.partition(":")[2].partition(".")[2]  # the copy numbers its tensors anew
            copied[blob] = writer.put_tensor(name, raw.to_numpy(), raw.dtype, raw.shape, step=step)
    at = values.schema.get_field_index("blob")
    column = from_strings([copied[blob] for blob in references])
    return values.set_column(at, values.schema.field(at), column), why_missing
