"""Makes the tables of what was measured: sites, their statistics over the steps, and histograms."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import numpy as np

from ...errors import ModtraceError
from ...recording.arrow.arrays import to_numpy
from ...recording.protocols import RecordingData
from ...recording.role import OP_ROLES, PARAMETER_GRAD, TABLE
from ...recording.statistics.known import title_of
from ...recording.statistics.tier2 import read_tier2
from ..tables.columns import Column, Rows
from ..values.history_statistics import (
    Cells,
    count_nonfinite,
    group_rows,
    is_measured,
    merge_tier2_cells,
    to_stat,
)
from ..values.selection import Owner, SelectedValues, Selection, select_values
from .modules import CLIPPED, Place
from .tables import NONE, ReportTable, narrow, number_column, round_to_show, text_column

#: The statistics of the table, those of tier 2 where they were measured.
SERIES = ("rms", "mean", "std", "abs_max", "l2", "min", "max", "mean_abs", "zero_fraction", "kurtosis")
_NONFINITE = "nonfinite"
#: What is to be known of the tensors of a role.
_ABOUT = {PARAMETER_GRAD: CLIPPED}


@dataclass(frozen=True, eq=False)
class RoleValues:
    """The measured rows of one role, by site and step."""

    role: str
    found: SelectedValues
    cells: Cells


def read_measured(data: RecordingData) -> list[RoleValues]:
    """Returns what was measured of modules and parameters, role by role; empty if nothing was."""
    there = set(data.table("sites")["role"].to_pylist())
    roles = [each.name for each in TABLE if each.name in there and each.name not in OP_ROLES]
    return [each for role in roles for each in _read_role(data, role)]


def _read_role(data: RecordingData, role: str) -> Iterator[RoleValues]:
    try:
        found = select_values(data, Selection(role=role, counters=False))
        found = found.filter(is_measured(to_stat("rms"), found.table))
    except (ModtraceError, ValueError):  # there are sites, and nothing was measured at them
        return
    yield RoleValues(role, found, group_rows(found))


def tabulate_sites(measured: list[RoleValues], index: Mapping[Place, int]) -> ReportTable:
    """Returns a row for each site, in the order in which the forward first calls their modules, role by role."""
    owners: list[Owner] = [owner for each in measured for owner in each.found.owners]
    roles = [each.role for each in measured for _ in each.found.names]
    module = [index.get((each.root, each.path), NONE) for each in owners]
    titles = {each.name: each.of_many for each in TABLE}
    return ReportTable(
        rows=len(owners),
        columns=(
            text_column("label", "site", (name for each in measured for name in each.found.names)),
            number_column("module", "module", "module", np.array(module, np.int64)),
            text_column("role", "role", roles),
            text_column("role_title", "role", (titles[each] for each in roles)),
            text_column("role_about", "measured", (_ABOUT.get(each, "") for each in roles)),
            text_column("slot", "slot", (each.slot for each in owners)),
        ),
    )


def steps_of(measured: list[RoleValues]) -> Column:
    """Returns the numbers of the steps in which something was measured."""
    found = [each.cells.step for each in measured]
    return np.unique(np.concatenate(found)) if found else np.zeros(0, np.int64)


def count_cells(measured: list[RoleValues]) -> int:
    """Returns how many numbers there are for each step."""
    stats = sum(any(_has(each, stat).any() for each in measured) for stat in SERIES)
    return sum(len(each.found.names) for each in measured) * stats


def count_histograms(measured: list[RoleValues]) -> int:
    """Returns how many histograms there are."""
    return sum(int(_is_there(each, "histogram").sum()) for each in measured)


def tabulate_series(measured: list[RoleValues], steps: Column) -> ReportTable:
    """Returns the statistics in the steps `steps`: all of the first site, then all of the second, and so on."""
    sites = sum(len(each.found.names) for each in measured)
    size = sites * len(steps)
    columns = {stat: np.full(size, np.nan) for stat in SERIES}
    nonfinite = np.full(size, NONE, np.int64)
    first = 0
    for each in measured:
        at, kept = _place(each, steps, first)
        nonfinite[at] = count_nonfinite(each.found, each.cells)[kept]
        for stat, column in columns.items():
            _fill(column, at, kept, each, stat)
        first += len(each.found.names)
    more = [
        number_column(stat, title_of(stat), "number", round_to_show(narrow(column)), overlay=True)
        for stat, column in columns.items()
        if not np.isnan(column).all()
    ]
    last = number_column(_NONFINITE, title_of(_NONFINITE), "count", nonfinite, overlay=True)
    return ReportTable(rows=size, columns=(*more, last))


def _place(measured: RoleValues, steps: Column, first: int) -> tuple[Rows, Column]:
    """Returns the row of each cell of a step that is shown, and which cells those are."""
    at = np.searchsorted(steps, measured.cells.step)
    kept = np.append(steps, -1)[at] == measured.cells.step
    rows = (first + measured.cells.site) * len(steps) + at
    return rows[kept], kept


def _fill(column: Column, at: Rows, kept: Column, measured: RoleValues, stat: str) -> None:
    has = _has(measured, stat)
    if has.any():
        with np.errstate(all="ignore"):
            values = to_stat(stat).compute(measured.found, measured.cells)
        column[at] = np.where(has, values, np.nan)[kept]


def _has(measured: RoleValues, stat: str) -> Column:
    return _is_there(measured, to_stat(stat).column)


def _is_there(measured: RoleValues, column: str) -> Column:
    """Returns which cells have a column."""
    return to_numpy(measured.found.table[column].is_valid())[measured.cells.single]


def tabulate_histograms(
    measured: list[RoleValues], steps: Column, shown: Column
) -> tuple[ReportTable, ReportTable]:
    """Returns the histograms of exponents of the steps `shown`, and their counts, each without empty bins at its ends.

    Args:
        measured: what was measured.
        steps: the numbers of all steps, in the order of their table.
        shown: the steps of which histograms are wanted.
    """
    rows: list[tuple[int, int, int, int, int, int]] = []
    counts: list[Column] = []
    first_site, size = 0, 0
    for each in measured:
        cells = each.cells
        wanted = np.flatnonzero(_is_there(each, "histogram") & np.isin(cells.step, shown))
        if len(wanted):
            tier2 = merge_tier2_cells(read_tier2(each.found.table), cells)
            for cell in wanted.tolist():
                bins = np.asarray(tier2.histogram[cell])
                filled = np.flatnonzero(bins)
                low, high = (int(filled[0]), int(filled[-1]) + 1) if len(filled) else (0, 0)
                step = int(np.searchsorted(steps, cells.step[cell]))
                site, zeros = first_site + int(cells.site[cell]), int(tier2.zero_count[cell])
                rows.append((site, step, size, high - low, low - 127, zeros))
                counts.append(bins[low:high])
                size += high - low
        first_site += len(each.found.names)
    sites, numbers, first, length, exponent, zero_count = np.array(rows, np.int64).reshape(-1, 6).T
    columns = (
        number_column("site", "site", "site", sites),
        number_column("step", "step", "step", numbers),
        number_column("first", "first bin", "count", first),
        number_column("length", "bins", "count", length),
        number_column("exponent", "exponent of the first bin", "number", narrow(exponent)),
        number_column("zeros", "zeros", "count", zero_count),
    )
    bins = np.concatenate(counts) if counts else np.zeros(0, np.int64)
    return (
        ReportTable(rows=len(sites), columns=columns),
        ReportTable(rows=len(bins), columns=(number_column("count", "elements", "count", bins),)),
    )
