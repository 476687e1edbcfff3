"""Turns the measurements of ended steps into the columns of the `values` table."""

import math
from collections.abc import Iterable, Sequence
from functools import cache
from itertools import chain
from operator import attrgetter
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from ...measure.measurers.measurer import Measurement
from ...measure.measurers.want import Extra, Want
from ...recording.arrow.arrays import Coded
from ...recording.phase import BACKWARD, PHASE_CODE, RECOMPUTE
from ...recording.statistics.moments import RAW
from ...recording.suggestions import ranges_of
from ...torch_internals.subclasses import DTensorShard, Mesh
from ..log.nesting import Ints
from ..log.segments import InsideCall, Segment
from ..steps.call_rows import NthMemory
from ..steps.step import Step
from .capture_masks import ROLE_BITS, ROLE_CODE, ROLE_CODES, CaptureMasks, Mask
from .extra_columns import extra_columns, extra_notes
from .measured import (
    Measured,
    MeasuredGradients,
    MeasuredInside,
    MeasuredOutputs,
    MeasuredParameters,
    PlainRows,
    columns_of,
    group_by_rows,
)
from .sites import NumberedKeys, SiteIds

Columns = dict[str, Any]


#: The statistics that a row of `measure.rows` holds, in its order, and the dtypes of their columns.
_STATISTICS = (*RAW, "first_index")
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
        memory: finds the `nth` of earlier calls.
        capture_masks: finds the captures for each step. While the number of a step was not known, tensors may have been
            measured that no capture wants.
        more_parts: the rows of outputs of ops.
    """
    calls = _CallsOfSegments(memory)
    parts = [_read(measured, step.number or 0, calls, sites) for step in steps for measured in step.values]
    parts = [*_without_repeats(parts), *more_parts]
    parts = [
        part for part in (_wanted(part, capture_masks.in_step(part.step)) for part in parts) if part.samples
    ]
    if not parts:
        return None
    parts.sort(key=lambda part: isinstance(part.samples, PlainRows))
    plain = [part.samples for part in parts if isinstance(part.samples, PlainRows)]
    samples = list(
        chain.from_iterable(part.samples for part in parts if not isinstance(part.samples, PlainRows))
    )
    step = np.concatenate([np.full(len(part.samples), part.step, np.int32) for part in parts])
    start_ns = np.concatenate([_integers_of("start_ns", samples), *(rows.start_ns for rows in plain)])
    ids = np.fromiter(map(id, samples), np.int64, len(samples))
    order = np.lexsort((start_ns, step))  # a stable sort keeps the sites of one tensor together
    step = step[order]
    named, masks, phase, module_id, nth, call_id, op_id = (
        np.concatenate(column)[order] for column in zip(*(part[2:9] for part in parts), strict=True)
    )
    kinds = _kinds_of(samples, plain, order)
    columns: Columns = {
        "step": step,
        "phase": np.ma.masked_array(phase, phase < 0),
        "site_id": sites.get(module_id.tolist(), nth.tolist(), named.tolist()),
        "call_id": np.ma.masked_array(call_id, call_id < 0),
        "op_id": np.ma.masked_array(op_id, op_id < 0),
        "order": _orders(step, np.concatenate([ids, *(rows.row for rows in plain)])[order]),
        **kinds,
        **_statistics(samples, plain, order),
    }
    extras: list[Extra | None] = [*map(attrgetter("extra"), samples)]
    if extras.count(None) < len(extras):  # most runs have none, and spare looking at each row
        extras += (len(order) - len(samples)) * [None]
        extras = [extras[at] for at in order.tolist()]
        wants = _wants(extras, masks, step, capture_masks)
        columns["note"] = extra_notes(kinds["note"], extras, wants)
        columns.update(extra_columns(extras, wants))
    return columns


def _kinds_of(samples: Sequence[Measurement], plain: Sequence[PlainRows], order: Ints) -> Columns:
    """Returns the columns that many tensors share: shapes, dtypes and notes."""
    kinds = NumberedKeys()
    of_samples = kinds.of(map(attrgetter("shape", "dtype", "note", "shard", "requires_grad"), samples))
    of_rows = np.concatenate([of_samples, *(kinds.of(rows.kinds)[rows.kind] for rows in plain)])[order]
    shapes, dtypes, notes, shards, requires_grad = zip(*kinds, strict=True)
    numels = [0 if dtype is None else math.prod(shape) for shape, dtype in zip(shapes, dtypes, strict=True)]
    return {
        "shape": Coded(shapes, of_rows),
        "dtype": Coded([_word(dtype) for dtype in dtypes], of_rows),
        "numel": np.array(numels, np.int64)[of_rows],
        "note": Coded(notes, of_rows),
        "requires_grad": _flags(requires_grad, of_rows),
        **({} if not any(shards) else _shard_columns(shards, of_rows)),
    }


def _flags(flags: Sequence[bool | None], of_rows: Ints) -> Any:
    """Returns a column of flags, masked where they are None."""
    return np.ma.masked_array(
        np.array([bool(flag) for flag in flags])[of_rows], np.array([flag is None for flag in flags])[of_rows]
    )


def _shard_columns(shards: Sequence[DTensorShard | None], of_rows: Ints) -> Columns:
    texts = {"placements": [shard and shard.placements for shard in shards]}
    texts["mesh"] = [shard and _describe_mesh(shard.mesh) for shard in shards]
    places = {
        name: [shard and getattr(shard, name) for shard in shards]
        for name in ("global_shape", "global_offset")
    }
    return {name: Coded(column, of_rows) for name, column in {**texts, **places}.items()}


def _describe_mesh(mesh: Mesh) -> str:
    sizes = [*map(str, mesh.sizes)]
    named = [f"{name}={size}" for name, size in zip(mesh.names, sizes, strict=True)] if mesh.names else sizes
    return f"{','.join(named)} on {ranges_of(mesh.ranks)}"


def _without_repeats(parts: "list[ValuePart]") -> "list[ValuePart]":
    """Drops the gradients of a recompute's arguments if the repeated forward has rows for the same arguments.

    A checkpoint gives both the same tensor or, if it is reentrant, a detached one, so the gradient would count twice.
    """
    if not any(any(part.recomputed) for part in parts):
        return parts
    known = {site for part in parts for site, again in _call_sites(part) if not again}
    for at, part in enumerate(parts):
        if any(part.recomputed):
            sites = enumerate(_call_sites(part))
            parts[at] = _only(part, [row for row, (site, again) in sites if not again or site not in known])
    return parts


def _call_sites(part: "ValuePart") -> Iterable[tuple[tuple[Any, ...], bool]]:
    """Yields (step, module_id, nth, name) of each gradient, and whether its call is a recompute."""
    sites = zip(
        part.module_id.tolist(), part.nth.tolist(), part.named.tolist(), part.recomputed, strict=False
    )
    for module_id, nth, named, again in sites:
        yield (part.step, module_id, nth, named), again and nth >= 0


def _wanted(part: "ValuePart", active: Mask) -> "ValuePart":
    """Returns the rows that a capture in `active` wants."""
    is_wanted = part.masks & active != 0
    return part if is_wanted.all() else _only(part, np.flatnonzero(is_wanted).tolist())


def _only(part: "ValuePart", here: list[int]) -> "ValuePart":
    """Returns the rows at these positions."""
    columns: Any = (column[here] for column in part[2:9])
    samples = part.samples
    chosen = samples.at(here) if isinstance(samples, PlainRows) else [samples[at] for at in here]
    return ValuePart(part.step, chosen, *columns)


def _wants(
    extras: Sequence[Extra | None], masks: Ints, steps: npt.NDArray[np.int32], capture_masks: CaptureMasks
) -> list[Want | None]:
    """Returns for each row with extra results what the captures want in its step; None for other rows."""
    with_extra = [at for at, extra in enumerate(extras) if extra is not None]
    active: dict[int, Mask] = {}
    wants: list[Want | None] = [None] * len(extras)
    for at, step, mask in zip(
        with_extra, steps[with_extra].tolist(), masks[with_extra].tolist(), strict=True
    ):
        if step not in active:
            active[step] = capture_masks.in_step(step)
        wants[at] = capture_masks.want(mask & active[step])
    return wants


class ValuePart(NamedTuple):
    """The rows of one `Measured` as columns; -1 stands for null."""

    step: int
    samples: Sequence[Measurement] | PlainRows
    named: Ints  # indices into `SiteIds.names`
    masks: Ints  # the captures that wanted the tensor when it was measured
    phase: npt.NDArray[np.int8]
    module_id: Ints
    nth: Ints
    call_id: Ints
    op_id: Ints
    recomputed: Sequence[bool] = ()  # for gradients, whether the call is a recompute


def _read(measured: Measured, step: int, calls: "_CallsOfSegments", sites: SiteIds) -> ValuePart:
    if isinstance(measured, MeasuredOutputs):
        return _read_outputs(measured, step, calls, sites)
    if isinstance(measured, MeasuredGradients):
        return _read_gradients(measured, step, calls, sites)
    if isinstance(measured, MeasuredInside):
        return _read_inside(measured, step, calls, sites)
    return _read_parameters(measured, step, sites)


def _read_outputs(
    measured: MeasuredOutputs, step: int, calls: "_CallsOfSegments", sites: SiteIds
) -> ValuePart:
    samples, events, slots, marks = columns_of(measured.sites, measured.width)
    found = calls.find(measured.segment, events)
    phase = _constant(samples, PHASE_CODE[measured.segment.phase], np.int8)
    return ValuePart(step, samples, *_named(slots, marks, sites), phase, *found, _constant(samples))


def _read_gradients(
    measured: MeasuredGradients, step: int, calls: "_CallsOfSegments", sites: SiteIds
) -> ValuePart:
    given, taps = columns_of(measured.sites, measured.width)
    of_taps = [
        (sample, tap.segment, event, slot, mark)
        for sample, tap in zip(given, taps, strict=True)
        for event, slot, mark in tap.sites()
    ]
    samples, segments, events, slots, marks = zip(*of_taps, strict=True) if of_taps else ((),) * 5
    found = np.full((3, len(samples)), -1, np.int64)
    of_events, numbers = np.array(events, np.int64), np.array([id(segment) for segment in segments], np.int64)
    for segment in dict.fromkeys(segments):
        here = numbers == id(segment)
        found[:, here] = calls.find(segment, of_events[here])
    recomputed = [segment.phase == RECOMPUTE for segment in segments]
    phase = _constant(samples, PHASE_CODE[BACKWARD], np.int8)
    return ValuePart(
        step,
        samples,
        *_named(slots, marks, sites),
        phase,
        found[0],
        found[1],
        found[2],
        _constant(samples),
        recomputed,
    )


def _read_inside(measured: MeasuredInside, step: int, calls: "_CallsOfSegments", sites: SiteIds) -> ValuePart:
    samples, owners, inside, slots, marks = columns_of(measured.sites, measured.width)
    module_id = np.array([owner.module_id for owner in owners], np.int64)
    phase = _constant(samples, PHASE_CODE[measured.phase], np.int8)
    nth, none = calls.number_inside(inside), _constant(samples)
    return ValuePart(step, samples, *_named(slots, marks, sites), phase, module_id, nth, none, none)


def _read_parameters(measured: MeasuredParameters, step: int, sites: SiteIds) -> ValuePart:
    samples, roles, slots, owners, masks = columns_of(measured.sites, measured.width)
    module_id = np.array([-1 if owner is None else owner.module_id for owner in owners], np.int64)
    phase = _constant(samples, PHASE_CODE[measured.phase], np.int8)
    named = sites.names_in_calls((ROLE_CODE[role] for role in roles), slots)
    none = _constant(samples)
    return ValuePart(step, samples, named, np.array(masks, np.int64), phase, module_id, none, none, none)


def _named(slots: Sequence[str], marks: Sequence[int], sites: SiteIds) -> tuple[Ints, Ints]:
    """Returns the numbers of the sites' names, and the captures that want them."""
    numbers = np.array(marks, np.int64)
    return sites.names_in_calls((numbers & ROLE_CODES).tolist(), slots), numbers >> ROLE_BITS


def _constant(samples: Sequence[Measurement], value: int = -1, kind: Any = np.int64) -> Any:
    return np.full(len(samples), value, kind)


class _CallsOfSegments:
    """Finds calls by the events with which they began or ended."""

    def __init__(self, memory: NthMemory) -> None:
        self._memory = memory
        self._known: dict[Segment, tuple[Ints, Ints, Ints]] = {}

    def find(self, segment: Segment, events: "Sequence[int] | Ints") -> tuple[Ints, Ints, Ints]:
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
        return np.array([-1 if call is None else number(call) for call in calls], np.int64)

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
    """Numbers the measurements of each step. Rows of one measurement share the number and are adjacent."""
    new, first = np.ones(len(step), bool), np.ones(len(step), bool)
    first[1:] = step[1:] != step[:-1]
    new[1:] = (samples[1:] != samples[:-1]) | first[1:]
    count = np.cumsum(new) - 1
    order: Ints = count - np.maximum.accumulate(np.where(first, count, 0))
    return order


def _integers_of(name: str, samples: Sequence[Measurement]) -> Ints:
    """Returns an attribute of each measurement; 50 ns for each."""
    return np.fromiter(map(attrgetter(name), samples), np.int64, len(samples))


def _statistics(samples: Sequence[Measurement], plain: Sequence[PlainRows], order: Ints) -> Columns:
    """Returns the columns of statistics; null where a tensor was not measured."""
    table = np.full((len(samples), len(_STATISTICS)), np.nan)
    measured = np.zeros(len(samples), bool)
    for rows, here, numbers in group_by_rows(samples):
        table[here], measured[here] = rows.read(numbers), True
    table = np.concatenate([table, *(some.rows.read(some.row.tolist()) for some in plain)])[order]
    measured = np.append(measured, np.ones(len(order) - len(samples), bool))[order]
    statistics = dict(zip(_STATISTICS, table.T, strict=True))
    empty = statistics["count"] == 0
    finite = (
        statistics["nan_count"] + statistics["inf_count"] == 0
    )  # the index of the first non-finite element was not written then
    null = {"min": empty, "max": empty, "first_index": finite | (statistics["first_index"] < 0)}
    columns: Columns = {}
    for name, values in statistics.items():
        missing = ~measured | null.get(name, False)
        if name in _WHOLE:
            values = np.where(missing, 0, values).astype(np.int64)
        is_count = name in ("nan_count", "inf_count")  # counts are never null, but 0
        columns[name] = values if is_count else np.ma.masked_array(values, missing)
    return columns


@cache
def _word(dtype: Any) -> str:
    return "" if dtype is None else str(dtype).removeprefix("torch.")
