"""Reads all tables of a recording that is still being written at one moment, so that they fit each other."""

import pyarrow as pa

from ..errors import RecordingError
from ..recording.raw_tensor import RawTensor
from ..recording.schema import schema, schemas
from .reader import FolderReader


class Snapshot:
    """The `RecordingData` of a recording as it is now. It does not change while the run goes on.

    Tables are read in the reverse order of writing: a row is written after all rows that it refers to, so that these
    are there, too. Other tables may have rows of the step that runs, as those of a killed run have.
    """

    def __init__(self, reader: FolderReader) -> None:
        """Reads all tables."""
        self._reader = reader
        self._tables = {name: _read(reader, name) for name in reversed(list(schemas()))}
        self.meta = reader.meta

    def table(self, name: str) -> pa.Table:
        """Returns all rows of a table, in its schema.

        Raises:
            ValueError: there is no such table.
            RecordingError: as `FolderReader.table` raises.
        """
        schema(name)
        found = self._tables[name]
        if isinstance(found, RecordingError):
            raise found
        return found

    def tensor(self, blob: str) -> RawTensor:
        """Returns a whole tensor, as `FolderReader.tensor` does."""
        return self._reader.tensor(blob)


def _read(reader: FolderReader, name: str) -> pa.Table | RecordingError:
    """Returns a table, or why it cannot be read."""
    try:
        return reader.table(name)
    except RecordingError as error:
        return error
