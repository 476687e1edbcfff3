"""A recording with other tables in place of some of its own."""

from collections.abc import Callable

from ...recording.meta import RunMeta
from ...recording.protocols import RecordingData
from ...recording.raw_tensor import RawTensor
from .columns import ArrowTable


class WithTables:
    """The `RecordingData` of a recording with other tables in place of some of its own."""

    def __init__(self, data: RecordingData, **tables: Callable[[], ArrowTable]) -> None:
        """Wraps a recording; each function makes the table of its name when that is first read."""
        self._data, self._make = data, tables
        self._made: dict[str, ArrowTable] = {}

    @property
    def meta(self) -> RunMeta:
        """The description of the recording's run."""
        return self._data.meta

    def table(self, name: str) -> ArrowTable:
        """Returns all rows of a table.

        Raises:
            ValueError: there is no such table.
        """
        if name not in self._make:
            return self._data.table(name)
        if name not in self._made:
            self._made[name] = self._make[name]()
        return self._made[name]

    def tensor(self, blob: str) -> RawTensor:
        """Returns a whole tensor.

        Raises:
            RecordingError: the tensor cannot be read.
        """
        return self._data.tensor(blob)
