"""Searches a recording for what made NaN or infinite values: the op where ops were measured, else the module."""

from collections.abc import Callable, Iterator
from dataclasses import replace

import numpy as np

from ...recording.arrow.arrays import to_numpy
from ...recording.phase import BACKWARD
from ...recording.protocols import RecordingData
from ...recording.role import GRAD_OUTPUT, LEAF, LOSS, OP_OUTPUT, OUTPUT, PARAMETER
from ...recording.statistics.moments import nonfinite_rows, sites_of_roles
from ...surface import choose_phrase
from ..step.calls import column_of
from ..step.inside import find_unseen
from ..step.placement import Module, merge_wrappers
from ..values.nonfinite import OVERFLOW, SOURCE, NonFinite, describe_row, require_measured
from .answer import answer
from .indexed_tables import IndexedTables
from .op_rules import SHAPES_ONLY, UNSCALES
from .step_counts import StepCounts
from .step_flow import read_step_flow
from .surroundings import add_surroundings
from .trace import Origin, Trace, trace_step

_GIVEN = "this module may only have been given them"


def find_first(
    data: RecordingData,
    selects: Callable[[str], bool] = lambda _: True,
    *,
    innocent: set[bytes] | None = None,
) -> NonFinite | None:
    """Returns what made the first NaN or infinite values; None if there are none, or only intended ones.

    Args:
        data: the recording.
        selects: of what was made by ops, whether it counts, by the path of the module.
        innocent: is added to, for the next part of the same recording: steps like these hold only intended values.

    Raises:
        NothingRecordedError: no tensor was measured.
    """
    tables = IndexedTables(data)
    every = _search(tables, set() if innocent is None else innocent)
    found = next((each for each in every if each.op is None or selects(each.path or "")), None)
    return None if found is None else add_surroundings(tables, found)


def find_all(data: RecordingData) -> Iterator[NonFinite]:
    """Yields what made NaN or infinite values in the order in which they came up.

    Intended values are left out, such as the `-inf` of masks, and so are those that the model itself looks for and
    replaces, and gradients that overflow before a GradScaler skips the step. Of modules of which no op was measured,
    the first in each step is named. The first also has its growth and aftermath.

    Raises:
        NothingRecordedError: no tensor was measured.
    """
    tables = IndexedTables(data)
    every = _search(tables, set())
    first = next(every, None)
    if first is not None:
        yield add_surroundings(tables, first)
        yield from every


def _search(tables: IndexedTables, innocent: set[bytes]) -> Iterator[NonFinite]:
    suspicious = _find_suspicious_steps(tables.data)
    if not suspicious:
        require_measured(tables.data)
    for step, sites in suspicious:
        if sites in innocent:
            continue
        found, is_innocent = _search_step(tables, step)
        if is_innocent:
            innocent.add(sites)
        yield from (replace(each, others=len(found) - 1) for each in found)


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


def _search_step(tables: IndexedTables, step: int) -> tuple[list[NonFinite], bool]:
    """Returns the findings of a step, and whether later steps like it need not be searched."""
    data = tables.of_step(step)
    of_ops = [number for number, site in tables.sites.items() if site.role == OP_OUTPUT]
    if not np.isin(column_of(data.table("values"), "site_id"), of_ops).any():
        row = next(_find_rows_of_modules(data), None)
        return [] if row is None else [_describe_module(tables, data, row)], row is None
    if not data.table("ops").num_rows or (data.meta.marks and not data.table("uses").num_rows):
        return _describe_partly_lost(data, unscales=False)
    flow = read_step_flow(data, step)
    counts = StepCounts(tables, data, flow)
    if counts.has_lost_rows:
        return _describe_partly_lost(data, unscales=UNSCALES in flow.bare_names)
    trace = trace_step(tables, flow, counts)
    found = [event for event in trace.events if not event.is_guarded(flow.bare_names)]
    guilty = _drop_unseen(data, step, trace, found) if found else found
    told = [answer(tables, trace, event, step) for event in guilty]
    rows = _find_unjudged(tables, data, trace) if len(guilty) == len(found) else _find_rows_of_modules(data)
    row = next((each for each in rows if _role_of(tables, data, each) != LEAF), None)
    if row is not None and not (guilty and guilty[0].counts.order <= _order_of(data, row)):
        told = [_describe_module(tables, data, row), *told]
    return [each for each in told if not (trace.unscales and _is_expected(each))], not guilty and row is None


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


def _describe_partly_lost(data: RecordingData, *, unscales: bool) -> tuple[list[NonFinite], bool]:
    """Returns the first tensor of a module that is not finite, else the first NaN, of a step that has lost rows.

    Which values are intended cannot be told without these rows.
    """
    values = data.table("values")
    with_nan = np.flatnonzero(column_of(values, "nan_count") > 0)
    with_nan = with_nan[np.argsort(column_of(values, "order")[with_nan], kind="stable")]
    row = next(iter([*_find_rows_of_modules(data), *with_nan.tolist()]), None)
    if row is None:
        return [], True
    found = replace(
        describe_row(data, row),
        hint="what made them, and whether they are intended, is not known: rows of this step are missing",
        remedy="copy the recording again, or record again",
    )
    return [] if unscales and _is_expected(found) else [found], False


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


def _is_expected(found: NonFinite) -> bool:
    """Returns whether a gradient overflowed: a GradScaler that looks at it skips the step and lowers its scale.

    NaN, and what is infinite at any scale, does not go away by that.
    """
    return found.phase == BACKWARD and not found.nan_count and found.cause in (None, OVERFLOW)
