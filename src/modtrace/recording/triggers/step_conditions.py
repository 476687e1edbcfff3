"""Defines the conditions of triggers, which check the rows of one step."""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from ..arrow.arrays import from_numpy, to_numpy
from ..arrow.batches import to_batch
from ..options.capture import Capture
from ..statistics.band import StepBand
from ..statistics.known import SUMS, names_of
from ..statistics.moments import RAW, StatColumns, read_statistics
from ..statistics.tier2 import SUM_COLUMNS, read_sums
from .site_names import SiteNames
from .step_tables import StepData
from .trigger_kinds import LOGGED, Above, NonFinite, OutOfBand, is_logged, selection_of

#: A scaler tries the largest scale again and again, so it skips a step now and then, and several at the beginning.
#: `_MANY` skips among the last `SKIPS_WINDOW` steps show that the gradients overflow at every scale.
SKIPS_WINDOW, _MANY = 20, 10


class Use(NamedTuple):
    """What becomes of the gradients of a step."""

    #: True if an optimizer uses them, or skips too many steps; False if it skips this one; None if only rows can tell.
    is_used: bool | None
    skipped: int = 0  # the number of skipped steps ...
    steps: int = 0  # ... among this many last steps


def are_many_skipped(count: int) -> bool:
    """Returns whether too many of the last steps were skipped for a lower scale to help."""
    return count >= _MANY


_Rows = npt.NDArray[np.int64]

#: The raw statistics of rows by name.
_Columns = Mapping[str, npt.NDArray[Any]]


class NonFiniteFinding(NamedTuple):
    """What made NaN or infinite values."""

    place: str  # a short description, the same in every step
    reason: str  # what happened at that place
    text: str  # the text that `modtrace nonfinite` prints; "" for a logged number


class Finder(Protocol):
    def __call__(
        self, data: StepData, selects: Callable[..., bool], /, *, use: Use
    ) -> NonFiniteFinding | None:
        """Returns what made the first NaN or infinite values of a step that count; None if there are none.

        Args:
            data: the rows of the step.
            selects: whether a module counts, by its path.
            use: what becomes of the gradients.
        """


class MeasuredRows(NamedTuple):
    """Rows of `values` that have statistics, in the order of measuring."""

    site_id: _Rows
    is_of_op: npt.NDArray[np.bool_]
    columns: _Columns


class StepRows(NamedTuple):
    """The rows of a step that conditions check."""

    measured: MeasuredRows | None
    scalars: Mapping[str, Sequence[float]]
    names: SiteNames
    data: StepData
    find_use: Callable[[], Use]  # finds what becomes of the gradients; it may wait for a device


#: A condition: returns the reason why it is true in a step, "" if it is false, and None if nothing that it checks was
#: measured.
Condition = Callable[[StepRows], str | None]


def read_measured(values: Sequence[Mapping[str, pa.Array]]) -> MeasuredRows | None:
    if not values:
        return None
    table = pa.Table.from_batches([to_batch("values", columns) for columns in values])
    order = to_numpy(table["order"])
    rows = np.argsort(order, kind="stable")
    rows = rows[to_numpy(table["count"])[rows] > 0]
    stats = read_statistics(table)
    columns = {name: getattr(stats, name) for name in RAW}
    columns |= {name: to_numpy(table[name], null=null) for name, null in SUM_COLUMNS.items()}
    return MeasuredRows(
        to_numpy(table["site_id"]).astype(np.int64)[rows],
        to_numpy(table["op_id"])[rows] >= 0,
        _take(columns, rows),
    )


def _take(columns: _Columns, rows: _Rows) -> _Columns:
    return {name: column[rows] for name, column in columns.items()}


def _statistic(stat: str, columns: _Columns) -> npt.NDArray[np.float64]:
    """Returns a statistic for each row, by name."""
    if stat in columns:
        return np.asarray(columns[stat], np.float64)
    stats = StatColumns(**{name: columns[name] for name in RAW})
    holder = stats if hasattr(StatColumns, stat) else read_sums(stats, columns)
    with np.errstate(all="ignore"):
        return np.asarray(getattr(holder, stat), np.float64)


class _Selected:
    """The rows of the sites that a trigger checks."""

    def __init__(self, selection: Capture) -> None:
        self._selection = selection
        self._mask = np.zeros(0, bool)
        self._revision = -1

    def rows(self, step: StepRows) -> _Rows:
        """Returns the indices of the selected rows among those measured."""
        if step.measured is None:
            return np.zeros(0, np.int64)
        if self._revision != step.names.revision:
            self._mask, self._revision = step.names.select(self._selection), step.names.revision
        site_id = step.measured.site_id
        if len(site_id) and int(site_id.max()) >= len(self._mask):
            self._mask = np.append(self._mask, step.names.select(self._selection, len(self._mask)))
        return np.flatnonzero(self._mask[site_id])


def condition_of(trigger: NonFinite | Above | OutOfBand, find: Finder | None) -> Condition:
    if isinstance(trigger, NonFinite):
        return IsNonFinite(trigger, find)
    judge: _Judge
    if isinstance(trigger, Above):
        judge = partial(_judge_by_limit, float(trigger.limit))
    else:
        judge = partial(_judge_by_band, StepBand(trigger.factor, trigger.window, trigger.needs))
    if is_logged(trigger.stat):
        return partial(_check_scalar, trigger.stat, judge)
    return partial(_check_sites, trigger.stat, _Selected(selection_of(trigger)), judge)


class IsNonFinite:
    def __init__(self, trigger: NonFinite, find: Finder | None) -> None:
        self.then = trigger.then
        self.finding: NonFiniteFinding | None = None  # the finding in the last checked step
        self._selection = selection_of(trigger)
        self._selected = _Selected(self._selection)
        self._find = find if trigger.asks_for_origin else None
        self._with_ops = trigger.roles is not None
        self._with_scalars = trigger.roles is None and trigger.include is None

    def __call__(self, step: StepRows) -> str | None:
        self.finding = None
        rows = self._selected.rows(step)
        if step.measured is not None and not self._with_ops:
            is_of_op = step.measured.is_of_op
            if self._find is not None and is_of_op.any():
                return self._find_origin(step, self._find) or self._scalars_in(step)
            rows = rows[~is_of_op[rows]]
        reason = self._of_tensors(step, rows)
        if reason and self._find is not None:
            reason = self._find_first_tensor(step, rows, self._find)
        reason = reason or self._scalars_in(step)
        is_known = len(rows) or (self._with_scalars and step.scalars)
        return reason if is_known else None

    def _find_origin(self, step: StepRows, find: Finder) -> str:
        """Returns a description of the op that made the values, or of the tensor that held them before any op did."""
        columns = {} if step.measured is None else step.measured.columns
        if columns and (columns["nan_count"] + columns["inf_count"]).any():
            selects = self._selection.paths.selects
            self.finding = find(step.data, selects, use=step.find_use())
        return "" if self.finding is None else self.finding.reason

    def _find_first_tensor(self, step: StepRows, rows: _Rows, find: Finder) -> str:
        """Returns a description of the first selected tensor that is not finite."""
        values = step.data.table("values")
        sites = np.unique(step.measured.site_id[rows]) if step.measured is not None else rows
        is_selected = np.isin(to_numpy(values["site_id"]), sites)
        data = step.data.with_values(values.filter(from_numpy(is_selected)))
        self.finding = find(data, lambda *_: True, use=step.find_use())
        return "" if self.finding is None else self.finding.reason

    def _scalars_in(self, step: StepRows) -> str:
        for name, values in step.scalars.items() if self._with_scalars else ():
            wrong = [value for value in values if not np.isfinite(value)]
            if wrong and "loss" in name.lower():  # in a metric, 0 / 0 is no finding
                reason = f"{LOGGED}{name} is {wrong[0]}"
                self.finding = self.finding or NonFiniteFinding(reason.partition(" ")[0], reason, "")
                return reason
        return ""

    def _of_tensors(self, step: StepRows, rows: _Rows) -> str:
        if step.measured is None:
            return ""
        nan_count, inf_count = step.measured.columns["nan_count"], step.measured.columns["inf_count"]
        wrong = rows[nan_count[rows] + inf_count[rows] > 0]
        if not len(wrong):
            return ""
        first = wrong[0]
        counts = {"NaN": int(nan_count[first]), "inf": int(inf_count[first])}
        held = ", ".join(f"{count} {what}" for what, count in counts.items() if count)
        return f"{step.names.describe(int(step.measured.site_id[first]))} holds {held}{_and_more(wrong)}"


class Judged(NamedTuple):
    """A mask of the numbers that are a reason to fire, and a description of the first of them."""

    is_wrong: npt.NDArray[np.bool_]
    why: str


#: A function that judges numbers, at least one, each given with the key of its site or name.
_Judge = Callable[[Sequence[object], npt.NDArray[np.float64]], Judged]


def _judge_by_limit(limit: float, keys: Sequence[object], values: npt.NDArray[np.float64]) -> Judged:
    """Finds numbers that are above a limit."""
    return Judged(values > limit, f"is above {limit:g}")


def _judge_by_band(last: StepBand, keys: Sequence[object], values: npt.NDArray[np.float64]) -> Judged:
    """Finds numbers that are outside of their band in the last steps, and adds all numbers to these."""
    rows = last.rows_of(keys)
    band = last.judge(rows, values)
    last.add(rows, values)
    first = int(np.argmax(band.is_outside))
    bounds = f"{band.middle[first]:g} +- {band.width[first]:g}"
    return Judged(band.is_outside, f"is outside of {bounds} (its last {band.steps[first]} steps)")


def _check_sites(stat: str, selected: _Selected, judge: _Judge, step: StepRows) -> str | None:
    """Checks a condition on a statistic of tensors, with one number for each site and step."""
    rows = selected.rows(step)
    if step.measured is not None and stat in names_of(SUMS):
        rows = rows[step.measured.columns["zero_count"][rows] >= 0]
    if step.measured is None or not len(rows):
        return None
    sites, columns = merge_sites(step.measured.site_id[rows], _take(step.measured.columns, rows))
    values = _statistic(stat, columns)
    judged = judge(sites.tolist(), values)
    wrong = np.flatnonzero(judged.is_wrong)
    if not len(wrong):
        return ""
    place = step.names.describe(int(sites[wrong[0]]))
    return f"{place}: {stat} {values[wrong[0]]:g} {judged.why}{_and_more(wrong)}"


def _check_scalar(stat: str, judge: _Judge, step: StepRows) -> str | None:
    """Checks a condition on a scalar, whose last number in the step counts."""
    logged = step.scalars.get(stat.removeprefix(LOGGED))
    if not logged:
        return None
    judged = judge([stat], np.array(logged[-1:], np.float64))
    return f"{stat} {logged[-1]:g} {judged.why}" if judged.is_wrong[0] else ""


def merge_sites(site_id: _Rows, columns: _Columns) -> tuple[_Rows, _Columns]:
    """Merges the rows of each site into one, in the order in which sites first occur.

    Several rows of a site are micro-batches, i.e. parts of one tensor.
    """
    sites, first, place = np.unique(site_id, return_index=True, return_inverse=True)
    if len(sites) == len(site_id):
        return site_id, columns
    by_site = np.argsort(place, kind="stable")
    starts = np.searchsorted(place[by_site], np.arange(len(sites)))
    in_order = np.argsort(first)
    join = {"min": np.minimum, "max": np.maximum}
    merged = {
        name: join.get(name, np.add).reduceat(column[by_site], starts)[in_order]
        for name, column in columns.items()
    }
    return sites[in_order], merged


def _and_more(wrong: _Rows) -> str:
    return f", and {len(wrong) - 1} more" if len(wrong) > 1 else ""
