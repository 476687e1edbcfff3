"""Reads all tables of a recording that is still being written at one moment, so that they fit each other."""

import pyarrow as pa

from ..recording.raw_tensor import RawTensor
from ..recording.schema import schema, schemas
from .reader import FolderReader


class Snapshot:
    """The `RecordingData` of a recording as it is now. It does not change while the run goes on.

    Tables are read in the reverse order of writing: a row is written after all rows that it refers to, so that these
    are there, too. Other tables may have rows of the step that runs, as those of a killed run have.
    """

    def __init__(self, reader: FolderReader) -> None:
        """Reads all tables.

        Raises:
            RecordingError: as `FolderReader.table` raises.
        """
        self._reader = reader
        self._tables = {name: reader.table(name) for name in reversed(list(schemas()))}
        self.meta = reader.meta

    def table(self, name: str) -> pa.Table:
        """Returns all rows of a table, in its schema.

        Raises:
            ValueError: there is no such table.
        """
        schema(name)
        return self._tables[name]

    def tensor(self, blob: str) -> RawTensor:
        """Returns a whole tensor, as `FolderReader.tensor` does."""
        return self._reader.tensor(blob)
