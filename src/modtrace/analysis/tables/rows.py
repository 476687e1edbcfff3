"""Reads chosen rows of a recording's tables, such as those of some steps, as numpy columns."""

from collections.abc import Collection

import numpy as np

from ...recording.arrow.arrays import to_numpy
from ...recording.protocols import RecordingData
from .columns import ArrowTable, Bools, Column, column_of, keep_rows, phase_codes, text_codes


class TableRows:
    """Chosen rows of a table; a column is read when it is first requested."""

    def __init__(self, table: ArrowTable) -> None:
        self._table = table

    def __len__(self) -> int:
        return int(self._table.num_rows)

    def __getitem__(self, name: str) -> Column:
        """Returns a column of numbers; -1 for null."""
        return column_of(self._table, name)

    def codes(self, name: str) -> tuple[Column, tuple[str, ...]]:
        """Returns a column of texts as codes, and the texts that they stand for; -1 for null."""
        return text_codes(self._table[name])

    @property
    def phase(self) -> Column:
        """The phase of each row as a code of `PHASES`; -1 for null."""
        return phase_codes(self._table["phase"])

    def is_known(self, name: str) -> Bools:
        """Returns in which rows a column has a value."""
        return np.asarray(to_numpy(self._table[name].is_valid()))


def read_rows(data: RecordingData, name: str, steps: Collection[int]) -> TableRows:
    """Returns the rows of a table that are of some steps."""
    table = data.table(name)
    return TableRows(keep_rows(table, np.isin(column_of(table, "step"), list(steps))))


def find_recorded_steps(data: RecordingData) -> list[int]:
    """Returns the numbers of all steps that have rows in any table, in ascending order."""
    columns = [column_of(data.table(name), "step") for name in ("steps", "calls", "ops")]
    steps: list[int] = np.unique(np.concatenate(columns)).tolist()
    return steps
