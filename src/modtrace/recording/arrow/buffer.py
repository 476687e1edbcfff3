"""Collects small batches of one table until they are taken as one large batch."""

from collections.abc import Mapping, Sequence
from typing import Any

import pyarrow as pa

from .batches import to_columns
from .dictionary_codes import TableDictionaries

# The number of small batches that are joined at once, so that a row is copied log64(batches) times, and 100,000 steps
# of one row leave dozens of batches rather than 100,000.
_JOINED_AT_ONCE = 64


class TableBuffer:
    """The rows of one table that were not taken yet."""

    def __init__(self, table: str) -> None:
        self._table = table
        self._dictionaries = TableDictionaries(table)
        self._levels: list[list[pa.RecordBatch]] = []  # level n holds batches joined n times, oldest first
        self.rows = 0
        self.size_bytes = 0

    @property
    def entries(self) -> int:
        """The number of strings in the dictionaries, which are kept when rows are taken."""
        return len(self._dictionaries)

    @property
    def dictionaries_size_bytes(self) -> int:
        """The bytes of the dictionaries in the batch that was last peeked at or taken."""
        return self._dictionaries.size_bytes

    def append(self, columns: Mapping[str, Any]) -> pa.RecordBatch:
        """Adds rows, and returns them as a batch of the given columns, with codes in place of strings.

        Raises:
            ValueError: the columns do not fit the table (`to_columns`). Nothing has been added.
        """
        coded = self._dictionaries.encode(to_columns(self._table, columns))
        if coded.num_rows:
            self.rows += coded.num_rows
            self.size_bytes += coded.get_total_buffer_size()  # 1 us, while nbytes takes 40 us
            self._add(coded, level=0)
        return coded

    def take(self) -> pa.RecordBatch:
        """Removes all rows and returns them as one batch, in order. There must be rows."""
        batch = self.peek()
        self._levels = []
        self.rows = self.size_bytes = 0
        return batch

    def peek(self) -> pa.RecordBatch:
        """Returns all rows as one batch, in order, and keeps them. There must be rows."""
        joined = self._join([batch for level in reversed(self._levels) for batch in level])
        self._levels = [[joined]]
        return self._dictionaries.decode(joined)

    def forget_dictionaries(self) -> None:
        """Empties the dictionaries. Call it only while there are no rows."""
        self._dictionaries = TableDictionaries(self._table)

    def _add(self, coded: pa.RecordBatch, level: int) -> None:
        if level == len(self._levels):
            self._levels.append([])
        self._levels[level].append(coded)
        if len(self._levels[level]) == _JOINED_AT_ONCE:
            joined, self._levels[level] = self._join(self._levels[level]), []
            self._add(joined, level + 1)

    def _join(self, batches: Sequence[pa.RecordBatch]) -> pa.RecordBatch:
        """Returns all rows as one batch. A column that some batches lack has its default values there."""
        if len(batches) == 1:
            return batches[0]
        [joined] = pa.Table.from_batches(self._dictionaries.align(batches)).combine_chunks().to_batches()
        self.size_bytes += joined.get_total_buffer_size()
        self.size_bytes -= sum(batch.get_total_buffer_size() for batch in batches)
        return joined
