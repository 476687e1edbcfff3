"""Groups rows of `values` by step and site, and merges the statistics of each group."""

from dataclasses import dataclass, fields
from typing import Any

import numpy as np

from ...recording.statistics.moments import StatColumns
from ...recording.statistics.tier2 import Tier2Columns
from ...recording.statistics.tier2_merge import merge_groups
from ..step.calls import Rows, column_of
from .selection import SelectedValues


@dataclass(frozen=True, kw_only=True)
class Cells:
    """Rows by step and site; a cell is what one site has in one step."""

    rows: Rows  # of all cells, one behind the other
    first: Rows  # where each cell begins in `rows`
    step: Rows  # of each cell
    site: Rows

    @property
    def single(self) -> Rows:
        """The first row of each cell."""
        return self.rows[self.first]

    def several(self) -> list[tuple[int, Rows]]:
        """The cells with more than one row, by number, and their rows."""
        sizes = np.diff(np.append(self.first, len(self.rows)))
        return [
            (cell, self.rows[self.first[cell] : self.first[cell] + sizes[cell]])
            for cell in np.flatnonzero(sizes > 1).tolist()
        ]


def group_rows(found: SelectedValues) -> Cells:
    """The cells, by step and then by site."""
    step = column_of(found.table, "step").astype(np.int64)
    rows = np.lexsort((found.site, step))
    new = np.ones(len(rows), bool)
    new[1:] = (np.diff(step[rows]) != 0) | (np.diff(found.site[rows]) != 0)
    first = np.flatnonzero(new)
    return Cells(rows=rows, first=first, step=step[rows][first], site=found.site[rows][first])


def merge_tier2_cells(tier2: Tier2Columns, cells: Cells) -> Tier2Columns:
    """The columns of tier 2 of each cell, by the rules of `merge_tier2`."""
    return merge_groups(tier2, np.split(cells.rows, cells.first[1:]) if len(cells.first) else [])


def merge_statistics(stats: StatColumns, cells: Cells) -> StatColumns:
    """The statistics of each cell: of all numbers of its rows together, by the rules of `StatColumns.merge`."""
    merged: dict[str, Any] = {each.name: getattr(stats, each.name)[cells.single] for each in fields(stats)}
    for cell, rows in cells.several():
        together = stats.merge(rows)
        for name, column in merged.items():
            value = getattr(together, name)
            column[cell] = np.nan if value is None else value
    return StatColumns(**merged)
