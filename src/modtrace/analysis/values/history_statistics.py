"""Merges the measured rows of one site and step, and computes the statistics of histories by name."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from ...errors import DamagedRecordingError
from ...recording.arrow.arrays import from_numpy, to_numpy
from ...recording.json_text import parse_json
from ...recording.statistics.known import OF_FORMATS, QUANTILE, STATISTICS
from ...recording.statistics.moments import DERIVED, RAW, Counts, Numbers, StatColumns, read_statistics
from ...recording.statistics.number_formats import FORMATS
from ...recording.statistics.tier2 import Tier2Columns, read_tier2
from ...recording.statistics.tier2_merge import merge_groups
from ...recording.suggestions import did_you_mean
from ...surface import choose_phrase, name_argument
from ..tables.columns import Rows, column_of
from .selection import SelectedValues


@dataclass(frozen=True, kw_only=True)
class Cells:
    """Rows grouped by step and site; a cell holds the rows of one site in one step."""

    rows: Rows  # of all cells, one behind the other
    first: Rows  # where each cell begins in `rows`
    step: Rows  # of each cell
    site: Rows

    @property
    def single(self) -> Rows:
        """The first row of each cell."""
        return self.rows[self.first]

    def several(self) -> list[tuple[int, Rows]]:
        """Returns the indices of the cells with more than one row, and their rows."""
        sizes = np.diff(np.append(self.first, len(self.rows)))
        return [
            (cell, self.rows[self.first[cell] : self.first[cell] + sizes[cell]])
            for cell in np.flatnonzero(sizes > 1).tolist()
        ]


def group_rows(found: SelectedValues) -> Cells:
    """Returns the cells, by step and then by site."""
    step = column_of(found.table, "step").astype(np.int64)
    rows = np.lexsort((found.site, step))
    new = np.ones(len(rows), bool)
    new[1:] = (np.diff(step[rows]) != 0) | (np.diff(found.site[rows]) != 0)
    first = np.flatnonzero(new)
    return Cells(rows=rows, first=first, step=step[rows][first], site=found.site[rows][first])


def merge_tier2_cells(tier2: Tier2Columns, cells: Cells) -> Tier2Columns:
    """Returns the columns of tier 2 of each cell, by the rules of `merge_tier2`."""
    return merge_groups(tier2, np.split(cells.rows, cells.first[1:]) if len(cells.first) else [])


def merge_statistics(stats: StatColumns, cells: Cells) -> StatColumns:
    """Returns the statistics of each cell over all numbers of its rows, by the rules of `StatColumns.merge`."""
    merged: dict[str, Any] = {each.name: getattr(stats, each.name)[cells.single] for each in fields(stats)}
    for cell, rows in cells.several():
        together = stats.merge(rows)
        for name, column in merged.items():
            value = getattr(together, name)
            column[cell] = np.nan if value is None else value
    return StatColumns(**merged)


_USER = "user"


class Stat(NamedTuple):
    """A statistic, and how it is computed."""

    name: str
    column: str  # it was measured where this column is not null
    compute: Callable[[SelectedValues, Cells], Numbers]  # raises ValueError if rows of a cell do not merge
    how: str  # what measures it


def to_stat(name: str) -> Stat:
    """Returns the statistic with a name.

    Raises:
        ValueError: there is none; the message lists the known names.
    """
    tier_1 = choose_phrase(
        python="values='stats' or Capture(stats=1)", command_line="modtrace record --values stats"
    )
    tier_2 = choose_phrase(
        python="values=modtrace.Capture(stats=2)", command_line="modtrace record --capture stats=2"
    )
    if name in (*RAW, *DERIVED):
        return Stat(name, "count", lambda found, cells: _usual(name, found, cells), tier_1)
    if name in STATISTICS or _is_asked_of_histogram(name):
        return Stat(name, "zero_count", lambda found, cells: _tier2(name, found, cells), tier_2)
    if name == _USER or name.startswith(f"{_USER}:"):
        in_python = choose_phrase(
            python="Capture(function=...)", command_line="Capture(function=...) in Python"
        )
        return Stat(name, _USER, lambda found, cells: _of_user(name, found, cells), in_python)
    given = name_argument("stat", name)
    of, _, asked = str(name).partition(":")
    if asked and of in OF_FORMATS:
        raise ValueError(f"{given}: no such number format; there are: {', '.join(FORMATS)}")
    if asked and of == QUANTILE:
        raise ValueError(f"{given}: give a part between 0 and 1, as in quantile:0.99")
    hint = did_you_mean(name, stat_names())
    raise ValueError(f"{given}: there is no such statistic.{hint} There are: {', '.join(stat_names())}")


def stat_names() -> list[str]:
    """Returns the names of all statistics. A part in capitals stands for a value."""
    asked = [*(f"{each}:FORMAT" for each in OF_FORMATS), f"{QUANTILE}:PART", f"{_USER}:KEY"]
    return [*STATISTICS, "relative", _USER, *asked]


def is_measured(stat: Stat, values: pa.Table) -> npt.NDArray[np.bool_]:
    """Returns which rows have a statistic.

    Raises:
        ValueError: none of them has.
    """
    measured: npt.NDArray[np.bool_] = to_numpy(values[stat.column].is_valid())
    if not measured.any():
        notes = sorted({note for note in values["note"].to_pylist() if note})
        why = f" Of these tensors it says: {'; '.join(notes[:3])}." if notes else ""
        given = name_argument("stat", stat.name)
        raise ValueError(f"{given} was not measured here. Record it with {stat.how}.{why}")
    return measured


def count_nonfinite(found: SelectedValues, cells: Cells) -> Counts:
    """Returns how many NaN and infinite numbers each cell has."""
    counts = read_statistics(found.table).nonfinite[cells.rows]
    return np.add.reduceat(counts, cells.first) if len(cells.first) else counts


def _usual(name: str, found: SelectedValues, cells: Cells) -> Numbers:
    column: Any = getattr(merge_statistics(read_statistics(found.table), cells), name)
    return np.asarray(column, np.float64)


# Of tier 2.


def _is_asked_of_histogram(name: str) -> bool:
    of, _, asked = name.partition(":")
    return (of in OF_FORMATS and asked in FORMATS) or (of == QUANTILE and _is_part(asked))


def _is_part(text: str) -> bool:
    try:
        return 0 <= float(text) <= 1
    except ValueError:
        return False


def _tier2(name: str, found: SelectedValues, cells: Cells) -> Numbers:
    merged = merge_tier2_cells(read_tier2(found.table), cells)
    of, _, asked = name.partition(":")
    if of == QUANTILE:
        low, high = merged.quantile(float(asked))
        return np.sqrt(low * high)  # the middle of a power of two; 0 where it may be 0
    if of == "overflow":
        return merged.overflow_fraction(asked).low
    if of == "dynamic_range":
        return merged.dynamic_range.low
    return _column(merged, of, asked)


def _column(merged: Tier2Columns, of: str, asked: str) -> Numbers:
    if asked:
        numbers: Numbers = getattr(merged, f"{of}_fraction")(asked)
        return numbers
    column = np.asarray(getattr(merged, of), np.float64)
    return np.where(column < 0, np.nan, column) if of in _COUNTED else column


#: Where they are not known, -1 stands for them.
_COUNTED = ("zero_count", "argmax")


# What the user's own functions returned.


def _of_user(name: str, found: SelectedValues, cells: Cells) -> Numbers:
    several = cells.several()
    if several:
        cell, rows = several[0]
        choice = choose_phrase(
            python="Choose one with call=, slot= or phase=",
            command_line="Recording.plot() in Python chooses one, by its arguments call, slot and phase",
        )
        raise ValueError(
            f"{name_argument('stat', name)}: {found.names[cells.site[cell]]} has {len(rows)} values of yours in step "
            f"{cells.step[cell]}, and they do not merge. {choice}."
        )
    texts = found.table[_USER].take(from_numpy(cells.single)).to_pylist()
    keys = name.split(":")[1:]
    return np.array([_number(_parse_user(text), keys) for text in texts], np.float64)


def _parse_user(text: str | None) -> Any:
    try:
        return None if text is None else parse_json(text)
    except ValueError as error:
        raise DamagedRecordingError(
            f"values.user: {(text or '')[:80]!r} is no value of your function: {error}. Copy the recording again."
        ) from error


def _number(value: Any, keys: Sequence[str]) -> float:
    """Returns the number below the keys; NaN if there is none. A list with one element counts as the element."""
    for key in keys:
        value = _below(_only(value), key)
    value = _only(value)
    try:
        return float(value) if isinstance(value, (int, float)) else math.nan
    except OverflowError:  # an integer beyond 1.8e308
        return math.copysign(math.inf, value)


def _only(value: Any) -> Any:
    return value[0] if isinstance(value, list) and len(value) == 1 else value


def _below(value: Any, key: str) -> Any:
    if isinstance(value, dict):
        return value.get(key)
    is_place = isinstance(value, list) and key.isdecimal() and int(key) < len(value)
    return value[int(key)] if is_place else None
