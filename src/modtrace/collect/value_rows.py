"""Turns what was measured in ended steps into the columns of the `values` and `sites` tables."""

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from ..measure.rows import Rows
from ..recording.phase import BACKWARD, OPTIMIZER, PHASES
from .call_rows import NthMemory
from .segments import Ints, Segment
from .steps import Step
from .values import GRAD_OUTPUT, OUTPUT, Sample, ValueRow

Columns = dict[str, Any]

_PHASE_CODE = {phase: code for code, phase in enumerate(PHASES)}

#: The statistics in a row of `measure.rows`, in its order, and as what they are written.
_STATISTICS = ("count", "min", "max", "sum", "sumsq", "nan_count", "inf_count")
_WHOLE = {"count", "nan_count", "inf_count"}
_NULL_IF_EMPTY = {"min", "max"}

_Site = tuple[int, int, str, str]  # module_id, nth, role, slot; -1 for null


class SiteIds:
    """The ids of all sites met; a site is the same in every step."""

    def __init__(self) -> None:
        self._ids: dict[_Site, int] = {}
        self._written = 0

    def get(self, site: _Site) -> int:
        """The id of a site, a new one if it has not been met."""
        return self._ids.setdefault(site, len(self._ids))

    def take_new(self) -> Columns | None:
        """The rows of the sites that came since the last time; None if none did."""
        first, self._written = self._written, len(self._ids)
        if first == self._written:
            return None
        new = list(self._ids)[first:]
        module_id, nth, role, slot = (list(column) for column in zip(*new, strict=True))
        return {
            "site_id": np.arange(first, self._written, dtype=np.int32),
            "module_id": _null_below_zero(module_id, np.int32),
            "nth": _null_below_zero(nth, np.int32),
            "role": role,
            "slot": slot,
        }


def value_columns(steps: Iterable[Step], sites: SiteIds, memory: NthMemory) -> Columns | None:
    """The rows of ended steps; None if there are none. To be called when their calls have been numbered."""
    calls = _CallsOfSegments(memory)
    rows = [(step, row) for step in steps for row in sorted(step.values, key=_start)]
    if not rows:
        return None
    orders = _orders(rows)
    places = [calls.find(row) for _, row in rows]
    measured = [row.sample.measurement for _, row in rows]
    columns: Columns = {
        "step": np.array([step.number for step, _ in rows], np.int32),
        "phase": np.array([_PHASE_CODE[_phase_of(row)] for _, row in rows], np.int8),
        "site_id": np.array(
            [
                sites.get((module_id, nth, row.role, row.slot))
                for (_, row), (module_id, nth, _) in zip(rows, places, strict=True)
            ],
            np.int32,
        ),
        "call_id": _null_below_zero([call_id for _, _, call_id in places], np.int64),
        "order": orders,
        "shape": [list(each.shape) for each in measured],
        "dtype": [_word(each.dtype) for each in measured],
        "numel": np.array([_numel(each) for each in measured], np.int64),
        "note": [each.note for each in measured],
    }
    columns.update(_statistics([row.sample for _, row in rows]))
    return columns


def free_rows(steps: Iterable[Step]) -> None:
    """Lets other tensors have the rows of these steps, which are written or not wanted."""
    taken: dict[Rows, dict[int, None]] = {}
    for step in steps:
        for row in step.values:
            measurement = row.sample.measurement
            if measurement.rows is not None:
                taken.setdefault(measurement.rows, {})[measurement.row] = None
        step.values = []
    for rows, numbers in taken.items():
        rows.free(list(numbers))


class _CallsOfSegments:
    """Finds the call that ended with an event, for many events of few segments."""

    def __init__(self, memory: NthMemory) -> None:
        self._memory = memory
        self._known: dict[Segment, tuple[Ints, Ints, npt.NDArray[np.int32] | None]] = {}

    def find(self, row: ValueRow) -> tuple[int, int, int]:
        """module_id, nth and call_id of a row; -1 where there is none."""
        segment = row.segment
        if segment is None:
            return (-1 if row.owner is None else row.owner.module_id), -1, -1
        known = self._known.get(segment)
        if known is None:
            known = self._known[segment] = self._read(segment)
        call_of_event, module_of_call, nth = known
        index = int(call_of_event[row.event])
        first_id = -1 if segment.first_id is None else segment.first_id + index
        return int(module_of_call[index]), -1 if nth is None else int(nth[index]), first_id

    def _read(self, segment: Segment) -> tuple[Ints, Ints, npt.NDArray[np.int32] | None]:
        structure = segment.structure()
        places = np.asarray(segment.places, np.int64)
        call_of_event = np.full(len(places), -1, np.int64)
        call_of_event[structure.exit_event] = np.arange(len(structure.exit_event))
        entered = places[structure.enter_event]
        modules = np.array([segment.log.all_places[at].named.module_id for at in entered.tolist()], np.int64)
        return call_of_event, modules, self._memory.get(segment)


def _start(row: ValueRow) -> int:
    return row.sample.start_ns


def _orders(rows: Sequence[tuple[Step, ValueRow]]) -> npt.NDArray[np.int64]:
    """Counts the measurements of each step; rows of one sample stand together."""
    step = np.array([each.number for each, _ in rows])
    sample = np.array([id(row.sample) for _, row in rows])
    new = np.ones(len(rows), bool)
    new[1:] = (sample[1:] != sample[:-1]) | (step[1:] != step[:-1])
    count = np.cumsum(new) - 1
    first = np.ones(len(rows), bool)
    first[1:] = step[1:] != step[:-1]
    order: npt.NDArray[np.int64] = count - np.maximum.accumulate(np.where(first, count, 0))
    return order


def _phase_of(row: ValueRow) -> str:
    if row.role == GRAD_OUTPUT:
        return BACKWARD
    if row.role == OUTPUT and row.segment is not None:
        return row.segment.phase
    return OPTIMIZER


def _statistics(samples: Sequence[Sample]) -> Columns:
    """The columns of the statistics; null where nothing was measured."""
    table = np.full((len(samples), len(_STATISTICS)), np.nan)
    measured = np.array([sample.measurement.rows is not None for sample in samples])
    places: dict[Rows, list[int]] = {}
    for at, sample in enumerate(samples):
        if sample.measurement.rows is not None:
            places.setdefault(sample.measurement.rows, []).append(at)
    for rows, here in places.items():
        table[here] = rows.read([samples[at].measurement.row for at in here])
    columns: Columns = {}
    empty = measured & (table[:, 0] == 0)
    for place, name in enumerate(_STATISTICS):
        values, missing = table[:, place], ~measured | (empty if name in _NULL_IF_EMPTY else False)
        if name in _WHOLE:
            values = np.where(measured, values, 0).astype(np.int64)
        columns[name] = np.ma.masked_array(values, missing)
    for name in ("nan_count", "inf_count"):  # never null: 0 where nothing was measured
        columns[name] = np.ma.getdata(columns[name])
    return columns


def _numel(measurement: Any) -> int:
    return 0 if measurement.dtype is None else int(np.prod(measurement.shape, dtype=np.int64))


def _word(dtype: Any) -> str:
    return "" if dtype is None else str(dtype).removeprefix("torch.")


def _null_below_zero(values: Sequence[int], kind: Any) -> Any:
    array = np.array(values, kind)
    return np.ma.masked_array(array, array < 0)
