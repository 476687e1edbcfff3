"""Turns the measurements of ended steps into the columns of the `values` table."""

import math
from collections.abc import Iterable, Sequence
from functools import cache
from itertools import chain
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from ...measure.measurer import Measurement
from ...measure.rows import FIRST_INDEX, Rows
from ...measure.want import Want
from ...recording.phase import BACKWARD, PHASE_CODE, RECOMPUTE
from ...recording.role import ROLES
from ..log.nesting import Ints
from ..log.segments import InsideCall, Segment
from ..steps.call_rows import NthMemory
from ..steps.step import Step
from .capture_masks import ROLE_BITS, ROLE_CODES, CaptureMasks, Mask
from .extra_columns import extra_columns, extra_notes
from .measured import Measured, MeasuredGradients, MeasuredInside, MeasuredOutputs, MeasuredParameters
from .sites import SiteIds, SiteName

Columns = dict[str, Any]


#: The statistics in a row of `measure.rows`, in its order, and as what they are written.
_STATISTICS = ("count", "min", "max", "sum", "sumsq", "nan_count", "inf_count", "first_index")
_WHOLE = {"count", "nan_count", "inf_count", "first_index"}


def value_columns(
    steps: Iterable[Step],
    sites: SiteIds,
    memory: NthMemory,
    capture_masks: CaptureMasks,
    more_parts: "Iterable[ValuePart]" = (),
) -> Columns | None:
    """Returns the rows of ended steps; None if there are none. The calls of the steps must have their ids.

    Args:
        steps: the ended steps.
        sites: the site ids of the recording.
        memory: the `nth` of earlier calls.
        capture_masks: finds what is wanted in which step. More may have been measured while the number of a step was
            not known.
        more_parts: the rows of what ops returned.
    """
    calls = _CallsOfSegments(memory)
    parts = [_read(measured, step.number or 0, calls) for step in steps for measured in step.values]
    parts = [*_without_repeats(parts), *more_parts]
    parts = [
        part for part in (_wanted(part, capture_masks.in_step(part.step)) for part in parts) if part.samples
    ]
    if not parts:
        return None
    samples = list(chain.from_iterable(part.samples for part in parts))
    step = np.concatenate([np.full(len(part.samples), part.step, np.int32) for part in parts])
    start_ns = np.array([each.start_ns for each in samples])
    order = np.lexsort((start_ns, step))  # stable: sites of one tensor stay
    samples = [samples[at] for at in order.tolist()]
    step = step[order]
    module_id, nth, call_id, phase, op_id = (
        np.concatenate(each)[order]
        for each in zip(
            *((part.module_id, part.nth, part.call_id, part.phase, part.op_id) for part in parts), strict=True
        )
    )
    names = list(chain.from_iterable(part.named for part in parts))
    named = [names[at] for at in order.tolist()]
    masks = np.concatenate([np.array(part.masks, np.int64) for part in parts])[order].tolist()
    extras = [each.extra for each in samples]
    wants = _wants(extras, masks, step.tolist(), capture_masks)
    return {
        "step": step,
        "phase": np.ma.masked_array(phase, phase < 0),
        "site_id": sites.get(module_id.tolist(), nth.tolist(), named),
        "call_id": np.ma.masked_array(call_id, call_id < 0),
        "op_id": np.ma.masked_array(op_id, op_id < 0),
        "order": _orders(step, np.array([id(each) for each in samples])),
        "shape": [each.shape for each in samples],
        "dtype": [_word(each.dtype) for each in samples],
        "numel": np.array([0 if each.dtype is None else math.prod(each.shape) for each in samples], np.int64),
        "note": extra_notes([each.note for each in samples], extras, wants),
        **_statistics(samples),
        **extra_columns(extras, wants),
    }


def _without_repeats(parts: "list[ValuePart]") -> "list[ValuePart]":
    """Drops the gradients of a recompute's arguments if the repeated forward has rows for the same arguments.

    A checkpoint gives both the same tensor or, if it is reentrant, a detached one, so the gradient would count twice.
    """
    if not any(any(part.recomputed) for part in parts):
        return parts
    known = {site for part in parts for site, again in _call_sites(part) if not again}
    return [_only_new(part, known) if any(part.recomputed) else part for part in parts]


def _only_new(part: "ValuePart", known: set[tuple[Any, ...]]) -> "ValuePart":
    here = [at for at, (site, again) in enumerate(_call_sites(part)) if not again or site not in known]
    return _only(part, here)


def _call_sites(part: "ValuePart") -> Iterable[tuple[tuple[Any, ...], bool]]:
    """Yields (step, module_id, nth, role, slot) of each gradient, and whether its call was a recompute."""
    sites = zip(part.module_id.tolist(), part.nth.tolist(), part.named, part.recomputed, strict=False)
    for module_id, nth, (role, slot, *_), again in sites:
        yield (part.step, module_id, nth, role, slot), again and nth >= 0


def _wanted(part: "ValuePart", active: Mask) -> "ValuePart":
    """Returns the rows that a capture in `active` wants."""
    if all(mask & active for mask in part.masks):
        return part
    return _only(part, [at for at, mask in enumerate(part.masks) if mask & active])


def _only(part: "ValuePart", here: list[int]) -> "ValuePart":
    """Returns the rows at the positions in `here`."""
    columns = (each[here] for each in (part.phase, part.module_id, part.nth, part.call_id, part.op_id))
    lists = ([each[at] for at in here] for each in (part.samples, part.named, part.masks))
    return ValuePart(part.step, *lists, *columns)  # type: ignore[arg-type]


def _wants(
    extras: Sequence[Any], masks: Sequence[Mask], steps: Sequence[int], capture_masks: CaptureMasks
) -> list[Want | None]:
    """Returns, for each row with extra results, what the captures want in its step; None for others."""
    active: dict[int, Mask] = {}
    wants: list[Want | None] = [None] * len(extras)
    for at, extra in enumerate(extras):
        if extra is not None:
            step = steps[at]
            if step not in active:
                active[step] = capture_masks.in_step(step)
            wants[at] = capture_masks.want(masks[at] & active[step])
    return wants


class ValuePart(NamedTuple):
    """The rows of one `Measured`, as columns; -1 stands for null."""

    step: int
    samples: Sequence[Measurement]
    named: Sequence[SiteName]
    masks: Sequence[Mask]  # the captures that wanted it when it was measured
    phase: npt.NDArray[np.int8]
    module_id: Ints
    nth: Ints
    call_id: Ints
    op_id: Ints
    recomputed: Sequence[bool] = ()  # of gradients: whether a recompute was given the tensor, or returned it


def _read(measured: Measured, step: int, calls: "_CallsOfSegments") -> ValuePart:
    if isinstance(measured, MeasuredOutputs):
        return _read_outputs(measured, step, calls)
    if isinstance(measured, MeasuredGradients):
        return _read_gradients(measured, step, calls)
    if isinstance(measured, MeasuredInside):
        return _read_inside(measured, step, calls)
    return _read_parameters(measured, step)


def _read_outputs(measured: MeasuredOutputs, step: int, calls: "_CallsOfSegments") -> ValuePart:
    samples, events, slots, marks = columns_of(measured.sites, 4)
    phase = np.full(len(samples), PHASE_CODE[measured.segment.phase], np.int8)
    found = calls.find(measured.segment, events)
    return ValuePart(step, samples, *_named(slots, marks), phase, *found, _none(samples))


def _read_gradients(measured: MeasuredGradients, step: int, calls: "_CallsOfSegments") -> ValuePart:
    sites = [
        (sample, tap.segment, event, slot, mark)
        for sample, tap in measured.sites
        for event, slot, mark in tap.sites()
    ]
    samples, segments, events, slots, marks = columns_of(sites, 5)
    found = np.full((3, len(samples)), -1, np.int64)
    keys = np.array([id(segment) for segment in segments], np.int64)
    for segment in dict.fromkeys(segments):
        here = np.flatnonzero(keys == id(segment))
        found[:, here] = calls.find(segment, [events[at] for at in here.tolist()])
    phase = np.full(len(samples), PHASE_CODE[BACKWARD], np.int8)
    recomputed = [segment.phase == RECOMPUTE for segment in segments]
    named, masks = _named(slots, marks)
    return ValuePart(
        step, samples, named, masks, phase, found[0], found[1], found[2], _none(samples), recomputed
    )


def _read_inside(measured: MeasuredInside, step: int, calls: "_CallsOfSegments") -> ValuePart:
    samples, owners, inside, slots, marks = columns_of(measured.sites, 5)
    module_id = np.array([owner.module_id for owner in owners], np.int64)
    phase = np.full(len(samples), PHASE_CODE[measured.phase], np.int8)
    nth, none = calls.number_inside(inside), _none(samples)
    return ValuePart(step, samples, *_named(slots, marks), phase, module_id, nth, none, none)


def _read_parameters(measured: MeasuredParameters, step: int) -> ValuePart:
    samples, roles, slots, owners, masks = columns_of(measured.sites, 5)
    module_id = np.array([-1 if owner is None else owner.module_id for owner in owners], np.int64)
    phase = np.full(len(samples), PHASE_CODE[measured.phase], np.int8)
    named = [(role, slot, None, -1) for role, slot in zip(roles, slots, strict=True)]
    none = _none(samples)
    return ValuePart(step, samples, named, masks, phase, module_id, none, none, none)


def _named(slots: Sequence[str], marks: Sequence[int]) -> tuple[list[SiteName], list[Mask]]:
    """Returns the names of the sites, and the captures that want them."""
    roles = [ROLES[mark & ROLE_CODES] for mark in marks]
    named: list[SiteName] = [(role, slot, None, -1) for role, slot in zip(roles, slots, strict=True)]
    return named, [mark >> ROLE_BITS for mark in marks]


def _none(samples: Sequence[Measurement]) -> Ints:
    return np.full(len(samples), -1, np.int64)


def columns_of(sites: Sequence[tuple[Any, ...]], width: int) -> list[tuple[Any, ...]]:
    return list(zip(*sites, strict=True)) if sites else [()] * width


class _CallsOfSegments:
    """Finds the calls that began or ended with given events."""

    def __init__(self, memory: NthMemory) -> None:
        self._memory = memory
        self._known: dict[Segment, tuple[Ints, Ints, Ints]] = {}

    def find(self, segment: Segment, events: Sequence[int]) -> tuple[Ints, Ints, Ints]:
        """Returns module_id, nth and call_id of each event; -1 where they are not known."""
        known = self._known.get(segment)
        if known is None:
            known = self._known[segment] = self._read(segment)
        call_of_event, module_of_call, nth_of_call = known
        calls = call_of_event[np.array(events, np.int64)]
        call_id = calls + segment.first_id if segment.first_id is not None else np.full(len(calls), -1)
        return module_of_call[calls], nth_of_call[calls], call_id

    def number_inside(self, calls: Iterable[InsideCall | None]) -> Ints:
        """Returns the `nth` of calls inside of compiled code; -1 where it is not known."""
        number = self._memory.number_inside
        return np.array([-1 if each is None else number(each) for each in calls], np.int64)

    def _read(self, segment: Segment) -> tuple[Ints, Ints, Ints]:
        structure = segment.structure(keep=False)
        contexts = np.asarray(segment.contexts, np.int64)
        call_of_event = np.full(len(contexts), -1, np.int64)
        call_of_event[structure.exit_event] = np.arange(len(structure.exit_event))
        call_of_event[structure.enter_event] = np.arange(len(structure.enter_event))
        entered = contexts[structure.enter_event].tolist()
        modules = np.array([segment.log.all_contexts[at].named.module_id for at in entered], np.int64)
        nth = self._memory.get(segment)
        return call_of_event, modules, np.full(len(modules), -1) if nth is None else nth.astype(np.int64)


def _orders(step: npt.NDArray[np.int32], samples: Ints) -> Ints:
    """Numbers the measurements of each step. The rows of one measurement are adjacent."""
    new, first = np.ones(len(step), bool), np.ones(len(step), bool)
    first[1:] = step[1:] != step[:-1]
    new[1:] = (samples[1:] != samples[:-1]) | first[1:]
    count = np.cumsum(new) - 1
    order: Ints = count - np.maximum.accumulate(np.where(first, count, 0))
    return order


def _statistics(samples: Sequence[Measurement]) -> Columns:
    """Returns the columns of the statistics; null where nothing was measured."""
    table = np.full((len(samples), len(_STATISTICS)), np.nan)
    measured = np.array([sample.rows is not None for sample in samples])
    by_rows: dict[Rows, list[int]] = {}
    for at, sample in enumerate(samples):
        if sample.rows is not None:
            by_rows.setdefault(sample.rows, []).append(at)
    for rows, here in by_rows.items():
        table[here] = rows.read([samples[at].row for at in here])
    empty = table[:, 0] == 0
    finite = table[:, 5] + table[:, 6] == 0  # nobody has written the index of the first then
    null = {"min": empty, "max": empty, "first_index": finite | (table[:, FIRST_INDEX] < 0)}
    columns: Columns = {}
    for column, name in enumerate(_STATISTICS):
        values, missing = table[:, column], ~measured | null.get(name, False)
        if name in _WHOLE:
            values = np.where(missing, 0, values).astype(np.int64)
        is_count = name in ("nan_count", "inf_count")  # never null: 0 where nothing was measured
        columns[name] = values if is_count else np.ma.masked_array(values, missing)
    return columns


@cache
def _word(dtype: Any) -> str:
    return "" if dtype is None else str(dtype).removeprefix("torch.")
