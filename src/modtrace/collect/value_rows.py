"""Turns what was measured in ended steps into the columns of the `values` and `sites` tables."""

import math
from collections.abc import Iterable, Sequence
from itertools import chain
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from ..measure.measurer import Measurement
from ..measure.rows import Rows
from ..recording.phase import BACKWARD, OPTIMIZER, PHASES
from ..recording.role import GRAD_OUTPUT, OUTPUT
from .call_rows import NthMemory
from .measured import Measured, MeasuredGradients, MeasuredOutputs, MeasuredParameters
from .segments import Ints, Segment
from .steps import Step

Columns = dict[str, Any]

_PHASE_CODE = {phase: code for code, phase in enumerate(PHASES)}

#: The statistics in a row of `measure.rows`, in its order, and as what they are written.
_STATISTICS = ("count", "min", "max", "sum", "sumsq", "nan_count", "inf_count")
_WHOLE = {"count", "nan_count", "inf_count"}
_NULL_IF_EMPTY = {"min", "max"}

_Site = tuple[int, int, tuple[str, str]]  # module_id, nth, role and slot; -1 for null


class SiteIds:
    """The ids of all sites met; a site is the same in every step."""

    def __init__(self) -> None:
        self._ids: dict[_Site, int] = {}
        self._written = 0

    def get(
        self, module_ids: Iterable[int], nths: Iterable[int], named: Iterable[tuple[str, str]]
    ) -> npt.NDArray[np.int32]:
        """The ids of sites, new ones for those that have not been met; `named` are role and slot."""
        ids = self._ids
        sites = zip(module_ids, nths, named, strict=True)
        return np.array([ids.setdefault(site, len(ids)) for site in sites], np.int32)

    def take_new(self) -> Columns | None:
        """The rows of the sites that came since the last time; None if none did."""
        first, self._written = self._written, len(self._ids)
        if first == self._written:
            return None
        new = list(self._ids)[first:]
        module_id, nth, named = (list(column) for column in zip(*new, strict=True))
        role, slot = (list(column) for column in zip(*named, strict=True))
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
    parts = [_read(measured, step.number or 0, calls) for step in steps for measured in step.values]
    parts = [part for part in parts if part.samples]
    if not parts:
        return None
    samples = list(chain.from_iterable(part.samples for part in parts))
    step = np.concatenate([np.full(len(part.samples), part.step, np.int32) for part in parts])
    order = np.lexsort(
        (np.array([each.start_ns for each in samples]), step)
    )  # stable: sites of one tensor stay
    samples = [samples[at] for at in order.tolist()]
    step = step[order]
    module_id, nth, call_id, phase = (
        np.concatenate(each)[order]
        for each in zip(
            *((part.module_id, part.nth, part.call_id, part.phase) for part in parts), strict=True
        )
    )
    roles = list(chain.from_iterable(part.roles for part in parts))
    slots = list(chain.from_iterable(part.slots for part in parts))
    named = [(roles[at], slots[at]) for at in order.tolist()]
    return {
        "step": step,
        "phase": phase,
        "site_id": sites.get(module_id.tolist(), nth.tolist(), named),
        "call_id": np.ma.masked_array(call_id, call_id < 0),
        "order": _orders(step, np.array([id(each) for each in samples])),
        "shape": [each.shape for each in samples],
        "dtype": [_word(each.dtype) for each in samples],
        "numel": np.array([_numel(each) for each in samples], np.int64),
        "note": [each.note for each in samples],
        **_statistics(samples),
    }


class _Part(NamedTuple):
    """The rows of one thing measured, in columns; -1 where there is none."""

    step: int
    samples: Sequence[Measurement]
    roles: Sequence[str]
    slots: Sequence[str]
    phase: npt.NDArray[np.int8]
    module_id: Ints
    nth: Ints
    call_id: Ints


def _read(measured: Measured, step: int, calls: "_CallsOfSegments") -> _Part:
    if isinstance(measured, MeasuredOutputs):
        return _read_outputs(measured, step, calls)
    if isinstance(measured, MeasuredGradients):
        return _read_gradients(measured, step, calls)
    return _read_parameters(measured, step)


def _read_outputs(measured: MeasuredOutputs, step: int, calls: "_CallsOfSegments") -> _Part:
    samples, events, slots = _columns(measured.sites, 3)
    phase = np.full(len(samples), _PHASE_CODE[measured.segment.phase], np.int8)
    return _Part(step, samples, [OUTPUT] * len(samples), slots, phase, *calls.find(measured.segment, events))


def _read_gradients(measured: MeasuredGradients, step: int, calls: "_CallsOfSegments") -> _Part:
    sites = [
        (sample, tap.segment, event, slot) for sample, tap in measured.sites for event, slot in tap.sites()
    ]
    samples, segments, events, slots = _columns(sites, 4)
    found = np.full((3, len(samples)), -1, np.int64)
    keys = np.array([id(segment) for segment in segments], np.int64)
    for segment in dict.fromkeys(segments):
        here = np.flatnonzero(keys == id(segment))
        found[:, here] = calls.find(segment, [events[at] for at in here.tolist()])
    phase = np.full(len(samples), _PHASE_CODE[BACKWARD], np.int8)
    return _Part(step, samples, [GRAD_OUTPUT] * len(samples), slots, phase, *found)


def _read_parameters(measured: MeasuredParameters, step: int) -> _Part:
    samples, roles, slots, owners = _columns(measured.sites, 4)
    module_id = np.array([-1 if owner is None else owner.module_id for owner in owners], np.int64)
    phase = np.full(len(samples), _PHASE_CODE[OPTIMIZER], np.int8)
    none = np.full(len(samples), -1, np.int64)
    return _Part(step, samples, roles, slots, phase, module_id, none, none)


def _columns(sites: Sequence[tuple[Any, ...]], width: int) -> list[tuple[Any, ...]]:
    return list(zip(*sites, strict=True)) if sites else [()] * width


class _CallsOfSegments:
    """Finds the calls that ended with given events."""

    def __init__(self, memory: NthMemory) -> None:
        self._memory = memory
        self._known: dict[Segment, tuple[Ints, Ints, Ints]] = {}

    def find(self, segment: Segment, events: Sequence[int]) -> tuple[Ints, Ints, Ints]:
        """module_id, nth and call_id; -1 where it is not known."""
        known = self._known.get(segment)
        if known is None:
            known = self._known[segment] = self._read(segment)
        call_of_event, module_of_call, nth_of_call = known
        calls = call_of_event[np.array(events, np.int64)]
        call_id = calls + segment.first_id if segment.first_id is not None else np.full(len(calls), -1)
        return module_of_call[calls], nth_of_call[calls], call_id

    def _read(self, segment: Segment) -> tuple[Ints, Ints, Ints]:
        structure = segment.structure(keep=False)
        places = np.asarray(segment.places, np.int64)
        call_of_event = np.full(len(places), -1, np.int64)
        call_of_event[structure.exit_event] = np.arange(len(structure.exit_event))
        entered = places[structure.enter_event].tolist()
        modules = np.array([segment.log.all_places[at].named.module_id for at in entered], np.int64)
        nth = self._memory.get(segment)
        return call_of_event, modules, np.full(len(modules), -1) if nth is None else nth.astype(np.int64)


def _orders(step: npt.NDArray[np.int32], samples: Ints) -> Ints:
    """Counts the measurements of each step; the rows of one stand together."""
    new, first = np.ones(len(step), bool), np.ones(len(step), bool)
    first[1:] = step[1:] != step[:-1]
    new[1:] = (samples[1:] != samples[:-1]) | first[1:]
    count = np.cumsum(new) - 1
    order: Ints = count - np.maximum.accumulate(np.where(first, count, 0))
    return order


def _statistics(samples: Sequence[Measurement]) -> Columns:
    """The columns of the statistics; null where nothing was measured."""
    table = np.full((len(samples), len(_STATISTICS)), np.nan)
    measured = np.array([sample.rows is not None for sample in samples])
    places: dict[Rows, list[int]] = {}
    for at, sample in enumerate(samples):
        if sample.rows is not None:
            places.setdefault(sample.rows, []).append(at)
    for rows, here in places.items():
        table[here] = rows.read([samples[at].row for at in here])
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
    return 0 if measurement.dtype is None else math.prod(measurement.shape)


def _word(dtype: Any) -> str:
    return "" if dtype is None else str(dtype).removeprefix("torch.")


def _null_below_zero(values: Sequence[int], kind: Any) -> Any:
    array = np.array(values, kind)
    return np.ma.masked_array(array, array < 0)
