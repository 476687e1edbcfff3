"""Merges the columns of tier 2 for parts of a tensor, for micro-batches or for ranks."""

from collections.abc import Sequence
from dataclasses import fields, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from ..arrow.arrays import from_numpy
from .moments import Counts, StatColumns, add_up, columns_of
from .tier2 import BINS, SUM_COLUMNS, Tier2Columns


def merge_tier2(
    columns: Tier2Columns,
    rows: Counts | slice = slice(None),
    *,
    offsets: Sequence[int] | Counts | None = None,
) -> Tier2Columns:
    """Returns the statistics of all numbers in these rows together, as columns of one row.

    Counts, histogram and channel maxima are exact. Sums are rounded once, so the order does not matter. A statistic
    that one of the rows with numbers lacks is missing in the result. Channel maxima need equally many channels in all
    rows.

    Args:
        columns: the columns.
        rows: the rows to merge.
        offsets: the offset of each row's elements in the flat tensor, if the rows are its parts. Without it there is
            no `argmax`.
    """
    if isinstance(rows, slice):
        rows = np.arange(len(columns.zero_count))[rows]
    places = np.asarray(rows, np.int64)
    has_numbers = columns.stats.count[places] > 0
    filled = places[has_numbers]
    is_known = bool(columns.is_measured[places].any() and columns.is_measured[filled].all())
    histogram, row = _merge_histograms(columns, places, filled)
    starts = None if offsets is None else np.asarray(offsets, np.int64)[has_numbers]
    return Tier2Columns(
        stats=columns_of([columns.stats.merge(places)]),
        sumabs=np.array([add_up(columns.sumabs[filled].tolist()) if is_known else np.nan]),
        zero_count=np.array([columns.zero_count[filled].sum() if is_known else -1]),
        sum4=np.array([add_up(columns.sum4[filled].tolist()) if is_known else np.nan]),
        argmax=np.array([-1 if starts is None else _merge_argmax(columns, filled, starts)]),
        histogram=histogram,
        histogram_row=row,
        channel_max=pa.array([_merge_channels(columns, filled)], pa.list_(pa.float32())),
    )


def merge_groups(columns: Tier2Columns, groups: Sequence[Counts]) -> Tier2Columns:
    """Returns one row for each group of rows, merged as by `merge_tier2`.

    A group of a single row is returned unchanged.
    """
    alone = [at for at, group in enumerate(groups) if len(group) == 1]
    single = take(columns, np.array([groups[at][0] for at in alone], np.int64))
    if len(alone) == len(groups):
        return single
    several = [at for at, group in enumerate(groups) if len(group) != 1]
    merged = _concatenate([_compact(single), *(merge_tier2(columns, groups[at]) for at in several)])
    return take(merged, np.argsort([*alone, *several]))


def take(columns: Tier2Columns, rows: Counts) -> Tier2Columns:
    """Returns a selection of the rows, in the given order."""
    return Tier2Columns(
        stats=columns.stats.take(rows),
        histogram=columns.histogram,
        channel_max=columns.channel_max.take(from_numpy(rows, pa.int64())),
        **{name: getattr(columns, name)[rows] for name in (*SUM_COLUMNS, "argmax", "histogram_row")},
    )


def _compact(columns: Tier2Columns) -> Tier2Columns:
    """Drops the histograms to which no row refers."""
    has_one = columns.histogram_row >= 0
    return replace(
        columns,
        histogram=columns.histogram[columns.histogram_row[has_one]],
        histogram_row=np.where(has_one, np.cumsum(has_one) - 1, -1),
    )


def _concatenate(parts: Sequence[Tier2Columns]) -> Tier2Columns:
    def join(name: str, of: Sequence[Any] = parts) -> Any:
        return np.concatenate([getattr(part, name) for part in of])

    stats = [part.stats for part in parts]
    starts = np.cumsum([0, *(len(part.histogram) for part in parts[:-1])])
    row = [
        np.where(part.histogram_row >= 0, part.histogram_row + start, -1)
        for part, start in zip(parts, starts.tolist(), strict=True)
    ]
    return Tier2Columns(
        stats=StatColumns(**{field.name: join(field.name, stats) for field in fields(StatColumns)}),
        histogram=join("histogram"),
        histogram_row=np.concatenate(row),
        channel_max=pa.concat_arrays([part.channel_max for part in parts]),
        **{name: join(name) for name in (*SUM_COLUMNS, "argmax")},
    )


def _merge_histograms(columns: Tier2Columns, places: Counts, filled: Counts) -> tuple[Counts, Counts]:
    has_one = columns.histogram_row >= 0
    if not (has_one[places].any() and has_one[filled].all()):
        return np.empty((0, BINS), np.int64), np.array([-1])
    total = columns.histogram[columns.histogram_row[filled]].sum(axis=0, dtype=np.int64)
    return total[None], np.array([0])


def _merge_argmax(columns: Tier2Columns, filled: Counts, starts: Counts) -> int:
    places = starts + columns.argmax[filled]
    if not len(filled) or (columns.argmax[filled] < 0).any():
        return -1
    has_nan = columns.stats.nan_count[filled] > 0
    largest = columns.stats.abs_max[filled]
    return int(places[has_nan if has_nan.any() else largest == largest.max()].min())


def _merge_channels(columns: Tier2Columns, filled: Counts) -> npt.NDArray[np.float32] | None:
    lists = [columns.channel_max[at].values for at in filled.tolist()]
    if not lists or None in lists or len({len(channels) for channels in lists}) > 1:
        return None
    largest: npt.NDArray[np.float32] = np.maximum.reduce(
        [np.asarray(channels, np.float32) for channels in lists]
    )
    return largest
