"""Searches a recording for what made NaN or infinite values: the op where ops were measured, else the module."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import islice
from typing import NamedTuple

import numpy as np
import pyarrow as pa

from ...recording.arrow.arrays import to_numpy
from ...recording.phase import BACKWARD, OPTIMIZER
from ...recording.protocols import RecordingData
from ...recording.role import GRAD_OUTPUT, LEAF, LOSS, OP_OUTPUT, OUTPUT, PARAMETER, PARAMETER_GRAD
from ...recording.statistics.moments import nonfinite_rows, sites_of_roles
from ...recording.triggers.skips import Use
from ...surface import choose_phrase
from ..tables.columns import Column, column_of
from ..tables.inside import find_unseen
from ..tables.op_rules import SHAPES_ONLY, UNSCALES
from ..tables.placement import Module, merge_wrappers
from ..values.nonfinite import OVERFLOW, SOURCE, NonFinite, describe_row, require_measured
from .answer import answer
from .earlier_steps import EarlierSteps
from .indexed_tables import IndexedTables
from .makers import Makers, is_read_later
from .memory import BAD, CLEAN
from .reach import Innocent, are_ends_finite, select_guilty
from .skipped_steps import SkippedSteps
from .step_counts import StepCounts
from .step_flow import read_step_flow
from .surroundings import add_surroundings, find_bad_losses
from .trace import Origin, Trace, trace_step

_GIVEN = "this module may only have been given them"


@dataclass(frozen=True)
class LiveStep:
    """What is known, beside its rows, of a step that has just ended; what they tell is added for the next one."""

    innocent: Innocent
    earlier: EarlierSteps
    use: Use
    values_before: Callable[[], pa.Table]  # rows of parameters and their gradients in the steps before


def find_first(
    data: RecordingData, selects: Callable[[str], bool] = lambda _: True, *, live: LiveStep | None = None
) -> NonFinite | None:
    """Returns what made the first NaN or infinite values; None if there are none, or only intended ones.

    Args:
        data: the recording.
        selects: of what was made by ops, whether it counts, by the path of the module.
        live: of a single step, while the run goes on.

    Raises:
        NothingRecordedError: no tensor was measured.
    """
    search = _Search(data, live)
    every = search.find_answers()
    found = next((each for each in every if each.op is None or selects(each.path or "")), None)
    return None if found is None else search.add_surroundings(found)


def find_all(data: RecordingData) -> Iterator[NonFinite]:
    """Yields what made NaN or infinite values in the order in which they came up.

    Intended values are left out, such as the `-inf` of masks, and so are those that the model itself looks for and
    replaces, and gradients that overflow before a GradScaler skips the step. Of modules of which no op was measured,
    the first in each step is named. The first also has its growth and aftermath.

    Raises:
        NothingRecordedError: no tensor was measured.
    """
    search = _Search(data)
    every = search.find_answers()
    first = next(every, None)
    if first is not None:
        yield search.add_surroundings(first)
        yield from every


def find_absorbed(data: RecordingData, most: int) -> list[NonFinite]:
    """Returns who made values that came to nothing that matters, each place in its first step; no more than `most`."""
    return list(_Search(data).find_absorbed(most))


class _Searched(NamedTuple):
    """What was found in a step."""

    told: list[NonFinite]
    is_innocent: bool  # later steps like it need not be searched
    absorbed: Callable[[], list[NonFinite]] = list


class _Search:
    """Searches the steps of a recording."""

    def __init__(self, data: RecordingData, live: LiveStep | None = None) -> None:
        self._tables = IndexedTables(data)
        self._live = live
        self._innocent = live.innocent if live else Innocent()
        if live and live.use.is_used:
            # The step is still open: what came to nothing so far may come to something.
            self._innocent = Innocent(set(live.innocent.steps), set(live.innocent.places))
        self._earlier = live.earlier if live else EarlierSteps()
        self._skipped = SkippedSteps(self._tables, live.use if live else None)
        self._makers = Makers(self._tables, self._earlier)

    def add_surroundings(self, found: NonFinite) -> NonFinite:
        """Adds the growth in front of the first answer, and what came of it."""
        before = [self._live.values_before()] if self._live else []
        return add_surroundings(self._tables, self._skipped, before, found)

    def find_answers(self) -> Iterator[NonFinite]:
        """Yields who made values that matter, step by step."""
        suspicious = _find_suspicious_steps(self._tables.data)
        if not suspicious:
            require_measured(self._tables.data)
        for step, sites in suspicious:
            if sites in self._innocent.steps:
                self._keep_unsearched(step)
                continue
            found = self._search_step(step)
            if found.is_innocent:
                self._innocent.steps.add(sites)
            yield from (replace(each, others=len(found.told) - 1) for each in found.told)

    def find_absorbed(self, most: int) -> Iterator[NonFinite]:
        """Returns who made values that came to nothing, each place in its first step; no more than `most`."""
        known, found = set[bytes](), dict[object, NonFinite]()
        for step, sites in _find_suspicious_steps(self._tables.data):
            if sites in known:
                continue
            known.add(sites)
            for each in self._search_step(step).absorbed():
                found.setdefault((each.root, each.path, each.phase, each.op, each.op_nth, each.slot), each)
            if len(found) >= most:
                break
        return islice(found.values(), most)

    def _search_step(self, step: int) -> _Searched:
        """Returns who made values in a step that are an answer, and who made others."""
        tables, data = self._tables, self._tables.of_step(step)
        if not np.isin(column_of(data.table("values"), "site_id"), tables.sites_of(OP_OUTPUT)).any():
            return self._search_modules(data, step)
        if not data.table("ops").num_rows or (data.meta.marks and not data.table("uses").num_rows):
            return _describe_partly_lost(data, unscales=False)
        flow = read_step_flow(data, step)
        counts = StepCounts(tables, data, flow, self._earlier)
        if counts.has_lost_rows:
            return _describe_partly_lost(data, unscales=UNSCALES in flow.bare_names)
        trace = trace_step(tables, flow, counts)
        self._keep_held(trace, step)
        losses = find_bad_losses(tables, step)
        are_finite = are_ends_finite(tables, data, losses, returns_meant=trace.returns_meant)
        found = select_guilty(trace, are_finite, self._innocent)
        guilty = _drop_unseen(data, step, trace, found) if found else found
        told = [self._answer(data, trace, event, step) for event in guilty]
        rows = (
            _find_unjudged(tables, data, trace) if len(guilty) == len(found) else _find_rows_of_modules(data)
        )
        row = next((each for each in rows if _role_of(tables, data, each) != LEAF and not are_finite), None)
        if row is not None and not (guilty and guilty[0].counts.order <= _order_of(data, row)):
            told = [self._describe_module(data, row), *told]
        if trace.unscales:
            told = [each for each in told if not _is_expected(each)] or _keep_if_many_skipped(
                told, self._skipped
            )

        def answer_absorbed() -> list[NonFinite]:
            others = [event for event in trace.events if event not in set(found)]
            return [
                self._answer(data, trace, event, step)
                for event in others
                if not is_read_later(tables, trace, event)
            ]

        return _Searched(told, not guilty and row is None, answer_absorbed)

    def _find_backwards(self, data: RecordingData) -> Column:
        """Returns the orders of measuring at which the backwards of a step began: of the first loss of each."""
        values = data.table("values").select(["site_id", "order"])
        rows = np.flatnonzero(np.isin(column_of(values, "site_id"), self._tables.sites_of(LOSS)))
        rows = rows[np.argsort(column_of(values, "order")[rows], kind="stable")]
        slots = [self._tables.sites[site].slot for site in column_of(values, "site_id")[rows].tolist()]
        # Of one with several losses the slots go up: [0], [1].
        is_first = [at == 0 or slot <= slots[at - 1] for at, slot in enumerate(slots)]
        found: Column = column_of(values, "order")[rows[is_first]]
        return found

    def _keep_held(self, trace: Trace, step: int) -> None:
        """Keeps for later steps what the tensors of a step hold at its end, while the run goes on."""
        if not self._earlier.is_complete:
            return
        held: dict[int, str | None] = {}
        for tensor, tensor_id in enumerate(trace.flow.tensors.tensor_id.tolist()):
            state = trace.memory.look(tensor)
            if state.kind == BAD:
                maker = trace.events[min(state.origins)].op
                held[tensor_id] = f"{trace.flow.describe_op(maker)} made it in step {step}"
            elif state.kind != CLEAN:
                held[tensor_id] = None
        self._earlier.add(held)

    def _keep_unsearched(self, step: int) -> None:
        """Keeps for later steps which tensors the ops of a step have made that is not searched."""
        if not self._earlier.is_complete:
            return
        ops = column_of(self._tables.of_step(step).table("ops"), "op_id")
        made = column_of(self._tables.find("tensors", ["tensor_id"], producer_op=ops), "tensor_id")
        if len(made):
            self._earlier.add_unsearched(int(made.min()), int(made.max()))

    def _search_modules(self, data: RecordingData, step: int) -> _Searched:
        """Returns the first tensor of a module that is not finite, of a step without measured ops."""
        row = next(_find_rows_of_modules(data), None)
        if row is None:
            return _Searched([], is_innocent=True)
        told = [self._describe_module(data, row)]
        if are_ends_finite(self._tables, data):
            return _Searched([], True, lambda: told)
        if step in self._skipped and _is_gradient(told[0]):
            return _Searched(_keep_if_many_skipped(told, self._skipped), is_innocent=False)
        return _Searched(told, is_innocent=False)

    def _answer(self, data: RecordingData, trace: Trace, event: Origin, step: int) -> NonFinite:
        of_op = (counts.order for (op, _), counts in trace.counts.outputs.items() if op == event.op)
        order = min(of_op, default=event.counts.order)
        return self._add_micro_batch(data, answer(self._tables, self._makers, trace, event, step), order)

    def _describe_module(self, data: RecordingData, row: int) -> NonFinite:
        found = _describe_module(self._tables, data, row)
        return self._add_micro_batch(data, found, _order_of(data, row))

    def _add_micro_batch(self, data: RecordingData, found: NonFinite, order: int) -> NonFinite:
        """Adds how many of several backwards of the step had begun before a measurement."""
        began = self._find_backwards(data)
        if len(began) < 2 or found.phase == OPTIMIZER:
            return found
        begun = int((began < order).sum())
        # Its own backward has begun where a backward runs, and in front of it the loss is measured.
        at = begun - 1 if found.phase == BACKWARD else begun
        return replace(found, micro_batch=min(max(at, 0), len(began) - 1), micro_batches=len(began))


def _find_suspicious_steps(data: RecordingData) -> list[tuple[int, bytes]]:
    """Returns the steps with NaN or infinite values, in order, each with a key.

    Steps that have NaN and infinities at the same sites have equal keys. The function reads four columns of `values` a
    batch at a time. Of a memory-mapped table, only their pages are read.
    """
    found = [np.empty((3, 0), np.int64)]
    columns = ["nan_count", "inf_count", "step", "site_id"]
    for batch in data.table("values").select(columns).to_batches():
        nan_count, inf_count, step, site = (to_numpy(column) for column in batch.columns)
        rows = np.flatnonzero((nan_count | inf_count) > 0)
        kind = (nan_count[rows] > 0) + 2 * (inf_count[rows] > 0)
        found.append(np.stack([step[rows], site[rows], kind]).astype(np.int64))
    every = np.concatenate(found, axis=1)
    every = every[:, np.lexsort(every[::-1])]
    is_new = np.ones(every.shape[1], bool)
    is_new[1:] = (every[:, 1:] != every[:, :-1]).any(axis=0)
    every = every[:, is_new]
    steps, starts = np.unique(every[0], return_index=True)
    of_steps = np.split(every[1:], starts, axis=1)[1:]
    return [(step, rows.tobytes()) for step, rows in zip(steps.tolist(), of_steps, strict=True)]


def _drop_unseen(data: RecordingData, step: int, trace: Trace, events: list[Origin]) -> list[Origin]:
    """Leaves out events in compiled code of which not all kernels are recorded: others wrote what its ops have read."""
    flow, unseen = trace.flow, find_unseen(data, step)
    call_ids = np.append(flow.ops.placed.calls.call_id, -1)
    return [
        each
        for each in events
        if int(call_ids[flow.ops.call[each.op]]) not in unseen.calls
        and (each.kind != SOURCE or int(flow.tensors.tensor_id[each.tensor]) not in unseen.tensors)
    ]


def _describe_partly_lost(data: RecordingData, *, unscales: bool) -> _Searched:
    """Returns the first tensor of a module that is not finite, else the first NaN, of a step that has lost rows.

    Which values are intended cannot be told without these rows.
    """
    values = data.table("values")
    with_nan = np.flatnonzero(column_of(values, "nan_count") > 0)
    with_nan = with_nan[np.argsort(column_of(values, "order")[with_nan], kind="stable")]
    row = next(iter([*_find_rows_of_modules(data), *with_nan.tolist()]), None)
    if row is None:
        return _Searched([], is_innocent=True)
    found = replace(
        describe_row(data, row),
        hint="what made them, and whether they are intended, is not known: rows of this step are missing",
        remedy="copy the recording again, or record again",
    )
    return _Searched([] if unscales and _is_expected(found) else [found], is_innocent=False)


def _find_rows_of_modules(data: RecordingData) -> Iterator[int]:
    """Yields the rows of a step's `values` that are of modules and not finite, in the order of measuring.

    If a loss is the first, parameters stand before it: they are measured later, as the step has used them.
    """
    values, sites = data.table("values"), data.table("sites")
    rows = nonfinite_rows(values, sites)
    rows = rows[np.argsort(column_of(values, "order")[rows], kind="stable")]
    of_rows = column_of(values, "site_id")[rows]
    if np.isin(of_rows[:1], sites_of_roles(sites, [LOSS])).any():
        rows = rows[np.argsort(~np.isin(of_rows, sites_of_roles(sites, [PARAMETER])), kind="stable")]
    yield from rows.tolist()


def _find_unjudged(tables: IndexedTables, data: RecordingData, trace: Trace) -> Iterator[int]:
    """Yields those of modules in which an op ran of which nothing was measured, and that no measured op returned."""
    partly, values = _find_partly_measured(trace), data.table("values")
    returned = {counts.order for counts in trace.counts.outputs.values()}
    for row in _find_rows_of_modules(data):
        site = tables.sites.get(values["site_id"][row].as_py())
        if site is not None and site.module_id in partly and _order_of(data, row) not in returned:
            yield row


def _role_of(tables: IndexedTables, data: RecordingData, row: int) -> str | None:
    site = tables.sites.get(data.table("values")["site_id"][row].as_py())
    return None if site is None else site.role


def _order_of(data: RecordingData, row: int) -> int:
    return int(data.table("values")["order"][row].as_py())


def _describe_module(tables: IndexedTables, data: RecordingData, row: int) -> NonFinite:
    found = describe_row(data, row)
    if _is_of_region(data, row):
        option = choose_phrase(
            python='record(compiled="inside")', command_line="modtrace record --compiled inside"
        )
        return replace(found, remedy=f"{option} names the module inside of this compiled one")
    values = data.table("values")
    if values["call_id"][row].as_py() is None and _role_of(tables, data, row) in (OUTPUT, GRAD_OUTPUT):
        # It was measured inside of compiled code.
        option = choose_phrase(python="record(ops=True)", command_line="modtrace record --ops")
        remedy = f'{option} names the op that made them where torch.compile has backend="aot_eager"'
        return replace(found, remedy=f"{remedy}; {_GIVEN}")
    if tables.data.table("ops").num_rows:
        return found
    option = choose_phrase(
        python="record(ops=True), on a long run with keep_last=20,",
        command_line="modtrace record --ops, on a long run with --keep-last 20,",
    )
    remedy = f"{option} names the op that made them"
    return replace(found, remedy=remedy if found.role == LOSS else f"{remedy}; {_GIVEN}")


def _is_of_region(data: RecordingData, row: int) -> bool:
    """Returns whether a row of `values` is of a module that ran as a compiled region, or that the region wraps."""
    calls, modules = data.table("calls"), merge_wrappers(data.table("modules").to_pylist())
    call_id, ids = data.table("values")["call_id"][row].as_py(), column_of(calls, "call_id")
    module: Module | None = None
    while call_id is not None and len(at := np.flatnonzero(ids == call_id)):
        call = calls.slice(int(at[0]), 1).to_pylist()[0]
        if module is not None and modules.get(call["module_id"]) is not module:
            return False
        if call["compiled"]:
            return True
        module, call_id = modules.get(call["module_id"]), call["parent_call_id"]
    return False


def _find_partly_measured(trace: Trace) -> set[int]:
    """Returns the modules in which an op ran of which nothing was measured, and those around them."""
    flow, placed = trace.flow, trace.flow.ops.placed
    calls = {int(flow.ops.call[op]) for op in flow.order if _is_unmeasured(trace, op)}
    found: set[int] = set()
    for call in calls:
        while call >= 0 and int(placed.calls.module[call]) not in found:
            found.add(int(placed.calls.module[call]))
            call = int(placed.calls.parent[call])
    return found


def _is_unmeasured(trace: Trace, op: int) -> bool:
    """Returns whether an op wrote numbers, and nothing was measured of them."""
    flow = trace.flow
    written = [(slot, tensor) for slot, tensor in flow.returns.get(op, ()) if flow.shown_by(tensor) is None]
    if flow.bare_names[op] in SHAPES_ONLY or any((op, slot) in trace.counts.outputs for slot, _ in written):
        return False
    return any(flow.holds_numbers(tensor) for _, tensor in written)


def _is_gradient(found: NonFinite) -> bool:
    """Returns whether it is a gradient, or a loss that a GradScaler has multiplied until it overflowed."""
    return (
        found.phase == BACKWARD
        or found.role == PARAMETER_GRAD
        or (found.role == LOSS and not found.nan_count)
    )


def _keep_if_many_skipped(told: list[NonFinite], skipped: SkippedSteps) -> list[NonFinite]:
    """Returns overflows of gradients that no optimizer used if there are many such steps: a lower scale is no help."""
    if not told or not skipped.are_many(told[0].step):
        return []
    count, last = skipped.count(told[0].step)
    hint = f"no optimizer used the gradients of {count} of the last {last} steps"
    remedy = (
        "they overflow at every scale of the GradScaler: use bfloat16, or compute what overflows in float32"
    )
    return [replace(each, hint=hint, remedy=remedy) for each in told]


def _is_expected(found: NonFinite) -> bool:
    """Returns whether a gradient overflowed: a GradScaler that looks at it skips the step and lowers its scale.

    NaN, and what is infinite at any scale, does not go away by that.
    """
    return found.phase == BACKWARD and not found.nan_count and found.cause in (None, OVERFLOW)
