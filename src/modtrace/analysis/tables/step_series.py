"""Arranges measured tensors as series: the statistics of each site over the steps."""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import pyarrow.compute as pc

from ...recording.arrow.arrays import to_numpy
from ...recording.phase import BACKWARD, PHASES, RECOMPUTE
from ...recording.role import PARAMETER_GRAD, ROLES
from ...recording.statistics.moments import RAW, StatColumns
from ...recording.triggers.step_conditions import merge_sites
from .columns import Column, Rows, dictionary_codes, split_rows
from .measured import lists_of
from .placement import read_modules
from .tensors import read_sizes
from .values import PlacedValues


@dataclass(frozen=True, kw_only=True, eq=False)
class StepSeries:
    """Statistics of sites over steps; their arrays have a row for each site and a column for each step.

    Several tensors of a site in one step, as of micro-batches, count as one. Where a site was not measured in a step,
    the count is 0, and the other statistics are NaN.
    """

    site_id: Column  # in the order in which the sites were measured first
    steps: Column  # ascending
    stats: StatColumns
    moment: Column  # the number of each measurement within its step; -1 where there is none
    dtypes: tuple[str, ...]  # the dtype of each site's first tensor

    @cached_property
    def is_measured(self) -> Column:
        """A mask of the sites and steps with numbers."""
        return np.asarray(self.stats.count > 0)

    @cached_property
    def is_zero(self) -> Column:
        """A mask of the sites and steps with tensors in which every number is 0."""
        return np.asarray(self.is_measured & (self.stats.min == 0) & (self.stats.max == 0))

    def median(self, statistic: Column) -> Column:
        """Returns for each site the median over the steps in which the statistic is a number; NaN without."""
        middle = np.full(len(self.site_id), np.nan)
        numbers = np.where(self.is_measured, statistic, np.nan)
        known = ~np.isnan(numbers).all(axis=1)
        middle[known] = np.nanmedian(numbers[known], axis=1)
        return middle

    def take(self, rows: Rows) -> "StepSeries":
        """Returns the series of some of the sites."""
        return StepSeries(
            site_id=self.site_id[rows],
            steps=self.steps,
            stats=self.stats.take(rows),
            moment=self.moment[rows],
            dtypes=tuple(self.dtypes[row] for row in rows.tolist()),
        )


def arrange_series(values: PlacedValues) -> StepSeries:
    """Returns the series of rows that were read.

    Rows of recomputes are left out, and so is what single backwards add to the gradient of a parameter. Of modules that
    return one tensor, as a container and its last module do, the innermost counts, and of several such the
    first one that was called.
    """
    stats = values.read_stats()
    is_of_backward = values.is_of(PARAMETER_GRAD) & (values.phase == PHASES.index(BACKWARD))
    rows = np.flatnonzero((stats.count > 0) & (values.phase != PHASES.index(RECOMPUTE)) & ~is_of_backward)
    rows = order_rows(values, rows)
    width = int(values.moment.max(initial=0)) + 1
    shared = (values.step[rows].astype(np.int64) * width + values.moment[rows]) * len(ROLES) + values.role[
        rows
    ]
    _, first = np.unique(shared, return_index=True)
    rows = rows[np.sort(first)]
    steps, step = np.unique(values.step[rows], return_inverse=True)
    known, first, site = np.unique(values.site_id[rows], return_index=True, return_inverse=True)
    order = np.argsort(first)
    site = np.argsort(order)[site.reshape(-1)]
    keys = site * len(steps) + step.reshape(-1)
    shape = len(known), len(steps)
    cells, merged = merge_sites(keys, {name: getattr(stats, name)[rows] for name in RAW})
    moment = np.full(shape, -1)
    moment.reshape(-1)[keys[::-1]] = values.moment[rows][::-1]
    codes, names = dictionary_codes(values.table["dtype"])
    return StepSeries(
        site_id=known[order],
        steps=steps,
        stats=StatColumns(**{name: _to_table(cells, merged[name], shape) for name in RAW}),
        moment=moment,
        dtypes=tuple(names[code] for code in codes[rows[first[order]]].tolist()),
    )


def order_rows(values: PlacedValues, rows: Rows) -> Rows:
    """Returns rows in the order of measuring; of those that share a tensor, the innermost and first called is first."""
    keys = values.call_id, -_find_depths(values), values.moment, values.step
    return rows[np.lexsort(tuple(key[rows] for key in keys))]


def _find_depths(values: PlacedValues) -> Column:
    """Returns how deep the module of each row lies in the module tree, from 1; 0 for none."""
    modules = read_modules(values.data)
    owners, which = np.unique(values.module, return_inverse=True)
    owned = [modules.get(owner) for owner in owners.tolist()]
    depth = [0 if module is None else bool(module.path) + module.path.count(".") + 1 for module in owned]
    return np.array(depth, np.int64)[which]


def largest_of_units(values: PlacedValues) -> Iterator[tuple[int, int, Column]]:
    """Yields sites with the number of their tensors and the largest magnitude in any of them of each of their units.

    Units are the indices of the last dimension of tensors with two or three, where `channel_max` was measured of them.
    """
    column, sizes = values.table["channel_max"], read_sizes(values.table["shape"])
    length = to_numpy(pc.list_value_length(column), null=-1)
    wide = np.pad(sizes, ((0, 0), (0, 4)), constant_values=-1)
    width = np.where(wide[:, 2] >= 0, wide[:, 2], wide[:, 1])
    rows = np.flatnonzero((length > 0) & (wide[:, 3] < 0) & (length == width))
    for site, of_site in split_rows(rows, values.site_id[rows]):
        if (length[of_site] == length[of_site[0]]).all():
            yield site, len(of_site), lists_of(column, of_site, int(length[of_site[0]])).max(axis=0)


def _to_table(cells: Rows, numbers: Column, shape: tuple[int, int]) -> Column:
    """Returns the numbers at their cells of a table; elsewhere NaN, or 0 for counts."""
    table = np.full(shape, np.nan if numbers.dtype.kind == "f" else 0, numbers.dtype)
    table.reshape(-1)[cells] = numbers
    return table
