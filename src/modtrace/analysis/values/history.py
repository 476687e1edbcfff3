"""Builds the history of one statistic, step by step and site by site."""

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from ...optional import require
from ...recording.protocols import RecordingData
from ...recording.role import PARAMETER, UPDATE
from ...recording.statistics.moments import Numbers
from ..tables.columns import Column, column_of, find_rows
from .history_statistics import count_nonfinite, group_rows, is_measured, to_stat
from .selection import Selection, select_values

#: The statistic of an update's size relative to that of its parameter before.
RELATIVE = "relative"


@dataclass(frozen=True, kw_only=True)
class History:
    """One statistic of many sites over steps, in arrays with one row a step and one column a site."""

    steps: npt.NDArray[np.int64]  # the steps in which one of the sites was measured, ascending
    sites: tuple[str, ...]  # in the order of the layers, even for gradients
    values: Numbers  # NaN where `measured` is False, and where the statistic is NaN
    stat: str
    role: str
    measured: npt.NDArray[np.bool_]
    nonfinite: npt.NDArray[np.bool_]  # where the tensors have NaN or infinite elements
    kinds: tuple[str, ...]  # of each step: "train", "eval", or "" if its end was not recorded
    others_before: npt.NDArray[
        np.int64
    ]  # for each step, how many earlier steps of the recording are of other kinds

    def to_frame(self) -> Any:
        """Returns a `pandas.DataFrame` with one row a step and one column a site.

        Raises:
            MissingLibraryError: pandas is not installed.
        """
        pandas = require("pandas", "History.to_frame()")
        steps = pandas.Index(self.steps, name="step")
        return pandas.DataFrame(self.values, index=steps, columns=list(self.sites))


def build_history(data: RecordingData, stat: str, selection: Selection) -> History:
    """Returns the history of a statistic; see `Recording.history`.

    Raises:
        TypeError: the path or the steps have a wrong type.
        ValueError: the selection is empty, there is no such statistic, or it was not measured.
    """
    if stat == RELATIVE:
        return _relative_history(data, selection)
    known = to_stat(stat)
    selected = select_values(data, selection)
    selected = selected.filter(is_measured(known, selected))
    cells = group_rows(selected)
    steps = np.unique(cells.step)
    cell = (np.searchsorted(steps, cells.step), cells.site)
    shape = (len(steps), len(selected.names))
    values, measured, nonfinite = np.full(shape, np.nan), np.zeros(shape, bool), np.zeros(shape, bool)
    values[cell], measured[cell] = known.compute(selected, cells), True
    nonfinite[cell] = count_nonfinite(selected, cells) > 0
    kinds, others_before = _find_kinds(data, steps)
    return History(
        steps=steps,
        sites=selected.names,
        values=values,
        stat=stat,
        role=selection.role,
        measured=measured,
        nonfinite=nonfinite,
        kinds=kinds,
        others_before=others_before,
    )


def _find_kinds(data: RecordingData, steps: Column) -> tuple[tuple[str, ...], Column]:
    """Returns the kind of each step, and how many earlier steps of the recording are of other kinds."""
    table = data.table("steps")
    numbers, texts = (
        column_of(table, "step"),
        np.array([kind or "" for kind in table["kind"].to_pylist()], str),
    )
    kinds = np.append(texts, "")[find_rows(numbers, steps)]
    before = np.zeros(len(steps), np.int64)
    for kind in {*kinds.tolist()}:
        others = np.sort(numbers[texts != kind])
        before[kinds == kind] = np.searchsorted(others, steps[kinds == kind])
    return tuple(kinds.tolist()), before


def _relative_history(data: RecordingData, selection: Selection) -> History:
    if selection.role != UPDATE:
        raise ValueError(
            f"stat={RELATIVE!r} is the size of updates: give role={UPDATE!r}, not {selection.role!r}"
        )
    updates = build_history(data, "l2", selection)
    parameters = build_history(data, "l2", replace(selection, role=PARAMETER))
    column_of_site = {name: column for column, name in enumerate(parameters.sites)}
    rows = find_rows(parameters.steps, updates.steps).tolist()
    columns = [column_of_site.get(name, -1) for name in updates.sites]
    # The added row and column are the ones that the index -1 selects.
    padded = np.pad(parameters.values, ((0, 1), (0, 1)), constant_values=np.nan)
    with np.errstate(all="ignore"):
        values = updates.values / padded[np.ix_(rows, columns)]
    return replace(updates, values=values, stat=RELATIVE)
