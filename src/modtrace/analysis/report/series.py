"""Builds the tables of measurements: sites, their statistics over the steps, and histograms."""

from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np

from ...errors import ModtraceError
from ...recording.arrow.arrays import to_numpy
from ...recording.protocols import RecordingData
from ...recording.role import OP_ROLES, PARAMETER_GRAD, TABLE
from ...recording.statistics.known import title_of
from ...recording.statistics.tier2 import TIER_2_COLUMNS, read_tier2
from ..tables.columns import Bools, Column, dictionary_codes
from ..values.history_statistics import (
    Cells,
    count_nonfinite,
    group_rows,
    is_measured,
    merge_tier2_cells,
    to_stat,
)
from ..values.selection import Owner, Places, SelectedValues, Selection, select_values
from .module_columns import CLIPPED
from .modules import Place
from .tables import NONE, ReportTable, narrow, number_column, round_to_show, text_column

#: The statistics of the table; those of tier 2 are left out where they were not measured.
SERIES = ("rms", "mean", "std", "abs_max", "l2", "min", "max", "mean_abs", "zero_fraction", "kurtosis")
#: Explanations of the measurements of a role.
_ABOUT = {PARAMETER_GRAD: CLIPPED}


@dataclass(frozen=True, eq=False)
class RoleValues:
    """The measured rows of one role, by site and step."""

    role: str
    selected: SelectedValues
    cells: Cells
    first_site: int  # the first number of the role's sites, which are numbered through all roles

    def has(self, column: str) -> Bools:
        """Returns in which cells, of a site and step, a column has a value."""
        return to_numpy(self.selected.select(column)[column].is_valid())[self.cells.single]


def read_measured(data: RecordingData) -> list[RoleValues]:
    """Returns the measured values of modules and parameters, one entry a role; empty if nothing was measured."""
    _, roles = dictionary_codes(data.table("sites")["role"])
    measured: list[RoleValues] = []
    sites, places = 0, Places(data)
    for role in TABLE:
        if role.name not in roles or role.name in OP_ROLES:
            continue
        try:
            selected = select_values(data, Selection(role=role.name, counters=False), places)
            selected = _join_replaced(selected.filter(is_measured(to_stat("rms"), selected)))
        except (ModtraceError, ValueError):  # the role has sites, but no measurements
            continue
        measured.append(RoleValues(role.name, selected, group_rows(selected), sites))
        sites += len(selected.names)
    return measured


def _join_replaced(selected: SelectedValues) -> SelectedValues:
    """Returns the values with one site for a module and for the one that replaced it under the same name."""
    first: dict[tuple[str, Owner], int] = {}
    keys = zip(selected.names, selected.owners, strict=True)
    site = np.array([first.setdefault(key, len(first)) for key in keys], np.int64)
    _, rows = np.unique(site, return_index=True)
    return replace(
        selected,
        site=site[selected.site],
        names=tuple(name for name, _ in first),
        primary=tuple(selected.primary[row] for row in rows.tolist()),
        owners=tuple(owner for _, owner in first),
    )


def _count_sites(measured: list[RoleValues]) -> int:
    return sum(len(values.selected.names) for values in measured)


def tabulate_sites(measured: list[RoleValues], index: Mapping[Place, int]) -> ReportTable:
    """Returns a row for each site, role by role, in the order in which forward first calls the modules."""
    owners = [owner for values in measured for owner in values.selected.owners]
    roles = [values.role for values in measured for _ in values.selected.names]
    module = [index.get((owner.root, owner.path), NONE) for owner in owners]
    titles = {role.name: role.of_many for role in TABLE}
    return ReportTable(
        rows=len(owners),
        columns=(
            text_column("label", "site", (name for values in measured for name in values.selected.names)),
            number_column("module", "module", "module", np.array(module, np.int64)),
            text_column("role", "role", roles),
            text_column("role_title", "role", (titles[role] for role in roles)),
            text_column("role_about", "measured", (_ABOUT.get(role, "") for role in roles)),
            text_column("slot", "slot", (owner.slot for owner in owners)),
        ),
    )


def steps_of(measured: list[RoleValues]) -> Column:
    """Returns the numbers of the steps in which something was measured."""
    return np.unique(np.concatenate([np.zeros(0, np.int64), *(values.cells.step for values in measured)]))


def count_cells(measured: list[RoleValues]) -> int:
    """Returns how many numbers are shown for each step."""
    columns = [to_stat(stat).column for stat in SERIES]
    stats = sum(any(values.has(column).any() for values in measured) for column in columns)
    return _count_sites(measured) * stats


def count_histograms(measured: list[RoleValues]) -> int:
    """Returns how many histograms were recorded."""
    return sum(int(values.has("histogram").sum()) for values in measured)


def tabulate_series(measured: list[RoleValues], steps: Column) -> ReportTable:
    """Returns the statistics in the given steps: all steps of the first site, then of the second, and so on."""
    size = _count_sites(measured) * len(steps)
    columns = {stat: np.full(size, np.nan) for stat in SERIES}
    nonfinite = np.full(size, NONE, np.int64)
    for values in measured:
        cells = values.cells
        step = np.searchsorted(steps, cells.step)
        kept = np.append(steps, -1)[step] == cells.step
        rows = ((values.first_site + cells.site) * len(steps) + step)[kept]
        nonfinite[rows] = count_nonfinite(values.selected, cells)[kept]
        for name, column in columns.items():
            stat = to_stat(name)
            has = values.has(stat.column)
            if has.any():
                with np.errstate(all="ignore"):
                    numbers = stat.compute(values.selected, cells)
                column[rows] = np.where(has, numbers, np.nan)[kept]
    more = [
        number_column(stat, title_of(stat), "number", round_to_show(narrow(column)), overlay=True)
        for stat, column in columns.items()
        if not np.isnan(column).all()
    ]
    last = number_column("nonfinite", title_of("nonfinite"), "count", nonfinite, overlay=True)
    return ReportTable(rows=size, columns=(*more, last))


def tabulate_histograms(
    measured: list[RoleValues], steps: Column, shown: Column
) -> tuple[ReportTable, ReportTable]:
    """Returns the table of exponent histograms in the steps `shown`, and a table of their counts without empty ends.

    Args:
        measured: the measured values, one entry a role.
        steps: the numbers of all steps, in the order of their table.
        shown: the steps whose histograms are included.
    """
    rows: list[tuple[int, int, int, int, int, int]] = []
    counts: list[Column] = [np.zeros(0, np.int64)]
    size = 0
    for values in measured:
        cells = values.cells
        wanted = np.flatnonzero(values.has("histogram") & np.isin(cells.step, shown))
        if not len(wanted):
            continue
        tier2 = merge_tier2_cells(read_tier2(values.selected.select(*TIER_2_COLUMNS)), cells)
        for cell in wanted.tolist():
            bins = np.asarray(tier2.histogram[cell])
            filled = np.flatnonzero(bins)
            low, high = (int(filled[0]), int(filled[-1]) + 1) if len(filled) else (0, 0)
            step = int(np.searchsorted(steps, cells.step[cell]))
            site, zeros = values.first_site + int(cells.site[cell]), int(tier2.zero_count[cell])
            rows.append((site, step, size, high - low, low - 127, zeros))
            counts.append(bins[low:high])
            size += high - low
    site, step, first, length, exponent, zeros = np.array(rows, np.int64).reshape(-1, 6).T
    columns = (
        number_column("site", "site", "site", site),
        number_column("step", "step", "step", step),
        number_column("first", "first bin", "count", first),
        number_column("length", "bins", "count", length),
        number_column("exponent", "exponent of the first bin", "number", narrow(exponent)),
        number_column("zeros", "zeros", "count", zeros),
    )
    elements = number_column("count", "elements", "count", np.concatenate(counts))
    return ReportTable(rows=len(rows), columns=columns), ReportTable(rows=size, columns=(elements,))
