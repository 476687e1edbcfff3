"""Merges the measured rows of one site and step, and computes the statistics of histories by name."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from ...errors import DamagedRecordingError
from ...recording.arrow.arrays import from_numpy, to_numpy
from ...recording.json_text import parse_json
from ...recording.statistics.known import OF_FORMATS, QUANTILE, STATISTICS
from ...recording.statistics.moments import DERIVED, RAW, Counts, Numbers, read_statistics
from ...recording.statistics.number_formats import FORMATS
from ...recording.statistics.tier2 import TIER_2_COLUMNS, Tier2Columns, read_tier2
from ...recording.statistics.tier2_merge import merge_groups
from ...recording.suggestions import did_you_mean
from ..tables.columns import Bools, Rows, column_of
from .selection import SelectedValues


@dataclass(frozen=True, kw_only=True)
class Cells:
    """Rows grouped into cells, each of which holds the rows of one site in one step."""

    rows: Rows  # the rows of all cells, concatenated
    first: Rows  # the index in `rows` at which each cell begins
    step: Rows  # the step of each cell
    site: Rows

    @property
    def single(self) -> Rows:
        """The first row of each cell, which is the only one of most."""
        return self.rows[self.first]

    def several(self) -> list[tuple[int, Rows]]:
        """Returns the cells with more than one row, by their indices, and their rows."""
        sizes = np.diff(np.append(self.first, len(self.rows)))
        return [
            (cell, self.rows[self.first[cell] : self.first[cell] + sizes[cell]])
            for cell in np.flatnonzero(sizes > 1).tolist()
        ]


def group_rows(found: SelectedValues) -> Cells:
    """Returns the cells, by step and then by site."""
    step = column_of(found.select("step"), "step").astype(np.int64)
    rows = np.lexsort((found.site, step))
    new = np.ones(len(rows), bool)
    new[1:] = (np.diff(step[rows]) != 0) | (np.diff(found.site[rows]) != 0)
    first = np.flatnonzero(new)
    return Cells(rows=rows, first=first, step=step[rows][first], site=found.site[rows][first])


def merge_tier2_cells(tier2: Tier2Columns, cells: Cells) -> Tier2Columns:
    """Returns the columns of tier 2 of each cell, by the rules of `merge_tier2`."""
    return merge_groups(tier2, np.split(cells.rows, cells.first[1:]) if len(cells.first) else [])


_USER = "user"


class Stat(NamedTuple):
    """A statistic of a history, and how to compute it."""

    name: str
    column: str  # a row has the statistic if this column is not null
    compute: Callable[[SelectedValues, Cells], Numbers]  # raises ValueError if rows cannot be merged
    how: str  # the option that has it measured


def to_stat(name: str) -> Stat:
    """Returns the statistic with a name.

    Raises:
        ValueError: there is no such statistic; the message lists the known names.
    """
    kind, _, argument = str(name).partition(":")
    if name in (*RAW, *DERIVED):
        how = "values='stats' or Capture(stats=1) (modtrace record --values stats)"
        return Stat(name, "count", lambda found, cells: _compute_usual(name, found, cells), how)
    is_of_histogram = kind in OF_FORMATS and argument in FORMATS
    if name in STATISTICS or is_of_histogram or (kind == QUANTILE and _is_part(argument)):
        how = "values=modtrace.Capture(stats=2) (modtrace record --capture stats=2)"
        return Stat(name, "zero_count", lambda found, cells: _compute_tier2(name, found, cells), how)
    if kind == _USER:
        how = "Capture(function=...) in Python"
        return Stat(name, _USER, lambda found, cells: _compute_user(name, found, cells), how)
    named = f"stat={name!r}"
    if argument and kind in OF_FORMATS:
        raise ValueError(f"{named}: no such number format; there are: {', '.join(FORMATS)}")
    if argument and kind == QUANTILE:
        raise ValueError(f"{named}: give a part between 0 and 1, as in quantile:0.99")
    hint = did_you_mean(name, stat_names())
    raise ValueError(f"{named}: there is no such statistic.{hint} There are: {', '.join(stat_names())}")


def stat_names() -> list[str]:
    """Returns the names of all statistics. A part in capitals stands for a value."""
    of_formats = (f"{kind}:FORMAT" for kind in OF_FORMATS)
    return [*STATISTICS, "relative", _USER, *of_formats, f"{QUANTILE}:PART", f"{_USER}:KEY"]


def is_measured(stat: Stat, found: SelectedValues) -> Bools:
    """Returns which rows have a statistic, and refuses selections without any.

    Raises:
        ValueError: no row has the statistic.
    """
    measured: Bools = to_numpy(found.select(stat.column)[stat.column].is_valid())
    if not measured.any():
        notes = sorted({note for note in found.select("note")["note"].to_pylist() if note})
        why = f" Of these tensors it says: {'; '.join(notes[:3])}." if notes else ""
        raise ValueError(f"stat={stat.name!r} was not measured here. Record it with {stat.how}.{why}")
    return measured


def count_nonfinite(found: SelectedValues, cells: Cells) -> Counts:
    """Returns the numbers of NaN and infinite elements in each cell."""
    counts = read_statistics(found.select(*RAW)).nonfinite[cells.rows]
    return np.add.reduceat(counts, cells.first) if len(cells.first) else counts


def _compute_usual(name: str, found: SelectedValues, cells: Cells) -> Numbers:
    """Returns a statistic of each cell over all numbers of its rows, by the rules of `StatColumns.merge`."""
    stats = read_statistics(found.select(*RAW))
    merged = stats.take(cells.single)
    for cell, rows in cells.several():
        together = stats.merge(rows)
        for raw in RAW:
            value = getattr(together, raw)
            getattr(merged, raw)[cell] = np.nan if value is None else value
    return np.asarray(getattr(merged, name), np.float64)


def _is_part(text: str) -> bool:
    try:
        return 0 <= float(text) <= 1
    except ValueError:
        return False


def _compute_tier2(name: str, found: SelectedValues, cells: Cells) -> Numbers:
    merged = merge_tier2_cells(read_tier2(found.select(*TIER_2_COLUMNS)), cells)
    kind, _, argument = name.partition(":")
    if kind == QUANTILE:
        low, high = merged.quantile(float(argument))
        return np.sqrt(low * high)  # the middle of a power of two on a log scale; 0 where the bin includes 0
    if kind == "overflow":
        return merged.overflow_fraction(argument).low
    if kind == "dynamic_range":
        return merged.dynamic_range.low
    if argument:
        numbers: Numbers = getattr(merged, f"{kind}_fraction")(argument)
        return numbers
    column = np.asarray(getattr(merged, kind), np.float64)
    is_unknown = (column < 0) & (kind in ("zero_count", "argmax"))  # for these statistics -1 means unknown
    return np.where(is_unknown, np.nan, column)


# Statistics by functions of the user.


def _compute_user(name: str, found: SelectedValues, cells: Cells) -> Numbers:
    several = cells.several()
    if several:
        cell, rows = several[0]
        raise ValueError(
            f"stat={name!r}: {found.names[cells.site[cell]]} has {len(rows)} values of yours in step "
            f"{cells.step[cell]}, and they do not merge. Choose one with call=, slot= or phase= in Python."
        )
    texts = found.select(_USER)[_USER].take(from_numpy(cells.single)).to_pylist()
    keys = name.split(":")[1:]
    return np.array([_read_number(_parse_user(text), keys) for text in texts], np.float64)


def _parse_user(text: str | None) -> Any:
    try:
        return None if text is None else parse_json(text)
    except ValueError as error:
        raise DamagedRecordingError(
            f"values.user: {(text or '')[:80]!r} is no value of your function: {error}. Copy the recording again."
        ) from error


def _read_number(value: Any, keys: Sequence[str]) -> float:
    """Returns the number below the keys; NaN if there is none. A list with one element counts as the element."""
    for key in (*keys, None):
        value = value[0] if isinstance(value, list) and len(value) == 1 else value
        if isinstance(value, dict) and key is not None:
            value = value.get(key)
        elif key is not None:
            is_place = isinstance(value, list) and key.isdecimal() and int(key) < len(value)
            value = value[int(key)] if is_place else None
    try:
        return float(value) if isinstance(value, (int, float)) else math.nan
    except OverflowError:  # the integer is larger than 1.8e308
        return math.copysign(math.inf, value)
