"""Whatever columns a collector hands over, what is written is accepted by the reader, and what was valid is there."""

import threading
import warnings
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import modtrace
from helpers.fuzzed import FUZZ
from helpers.kept import META
from helpers.typed_rows import Columns, calls_of, columns_of, same
from modtrace.collect.ops import rows as op_rows
from modtrace.recording.arrow.batches import to_batch
from modtrace.recording.arrow.checked_sink import CheckedSink
from modtrace.recording.arrow.table_rules import find_fault, is_surely_right
from modtrace.recording.failure_reporter import FailureReporter
from modtrace.recording.in_memory.recording import MemoryRecording
from modtrace.recording.protocols import Sink
from modtrace.recording.schema import schema, schemas
from modtrace.store.flight_recorder.sink import FlightRecorder
from modtrace.store.reader import FolderReader
from modtrace.store.writer import FolderWriter

#: What may be wrong with a value, whatever its column: negative, beyond all ids, of another type, not a number ...
WRONG: list[Any] = [
    -1, -16, 2**62, 2**70, 2**31, float("nan"), float("inf"), 0.5, None, "no such word", "\ud800", b"\xff", True,
    [-1], [None], [2, -7], ["x"], [0] * 255, {}, (1, "x"),
]  # fmt: skip


def checked(sink: Sink, *, strict: bool = False) -> CheckedSink:
    return CheckedSink(sink, FailureReporter(sink, threading.RLock(), strict=strict, step=lambda: 3))


def is_valid(table: str, columns: Columns) -> bool:
    """Whether the reader accepts a batch of these columns."""
    try:
        batch = to_batch(table, columns)
    except ValueError:
        return False
    return find_fault(table, pa.Table.from_batches([batch])) is None


@st.composite
def damaged(draw: st.DrawFn) -> tuple[str, Columns, Columns]:
    """A table, valid columns of it, and the same with some values replaced."""
    table = draw(st.sampled_from(sorted(schemas())))
    good = draw(columns_of(table).filter(lambda columns: is_valid(table, columns)))
    bad = {name: [*values] for name, values in good.items()}
    for values in bad.values():
        for at in range(len(values)):
            if draw(st.integers(0, 3)) == 0:
                values[at] = draw(st.sampled_from(WRONG))
    return table, good, bad


def one_row(columns: Columns, row: int) -> Columns:
    return {name: values[row : row + 1] for name, values in columns.items()}


def expected(table: str, columns: Columns) -> list[dict[str, Any]]:
    """The rows, one by one: each value alone decides whether it stays. Circles are not looked for."""
    found = []
    for row in range(len(next(iter(columns.values())))):
        fields = {name: schema(table).field(name) for name in columns}
        base = {name: [None] if field.nullable else _plain(field) for name, field in fields.items()}
        kept: Columns = {}
        for name, value in one_row(columns, row).items():
            if is_valid(table, {**base, **_needed(table), name: value}):
                kept[name] = value
            elif fields[name].nullable:
                kept[name] = [None]
        if kept.keys() == columns.keys():
            found += to_batch(table, {**_needed(table), **kept}).to_pylist()
    return found


def _needed(table: str) -> Columns:
    """The phase and the role, which must be given."""
    return {
        field.name: [_WORDS[field.name]]
        for field in schema(table)
        if field.name in _WORDS and not field.nullable
    }


_WORDS = {"phase": "forward", "role": "input"}


def _plain(field: pa.Field) -> list[Any]:
    if field.name in _WORDS:
        return [_WORDS[field.name]]
    if pa.types.is_list(field.type):
        return [[]]
    if pa.types.is_boolean(field.type):
        return [False]
    return [""] if pa.types.is_dictionary(field.type) or pa.types.is_string(field.type) else [0]


@settings(max_examples=30 * FUZZ, deadline=None)
@given(case=damaged())
def test_what_is_written_is_what_readers_accept_of_it(case):
    table, good, bad = case
    with TemporaryDirectory() as folder, warnings.catch_warnings():
        warnings.simplefilter("ignore", modtrace.ModtraceWarning)
        path = Path(folder) / "run.modtrace"
        writer = FolderWriter(path, META)
        sink = checked(writer)
        sink.write(table, good)
        sink.write(table, bad)
        sink.close()
        found = FolderReader(path).table(table).to_pylist()
    wanted = to_batch(table, good).to_pylist() if len(next(iter(good.values()))) else []
    wanted += expected(table, bad)
    for rows in (found, wanted):
        for row in rows:
            if table in ("calls", "modules"):
                row.pop("parent_call_id" if table == "calls" else "parent_id")  # of a circle
    assert same(found, wanted)


@settings(max_examples=30 * FUZZ, deadline=None)
@given(case=damaged())
def test_quick_look_accepts_nothing_that_readers_refuse(case):
    table, good, bad = case
    for columns in (good, bad):
        try:
            batch = to_batch(table, columns)
        except ValueError:
            continue
        if is_surely_right(table, dict(zip(batch.schema.names, batch.columns, strict=True))):
            assert find_fault(table, pa.Table.from_batches([batch])) is None


def test_quick_look_accepts_what_a_program_has_recorded() -> None:
    capture = modtrace.Capture(roles="all", stats=2, hash=True, sketch=True)
    net = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    with modtrace.record(net, ops=True, values=capture, backward_times=True) as rec:
        for _ in range(2):
            optimizer.zero_grad()
            net(torch.ones(3, 4)).sum().backward()
            optimizer.step()
    doubted = []
    for name in schemas():
        batches = rec.table(name).to_batches()
        columns = [dict(zip(batch.schema.names, batch.columns, strict=True)) for batch in batches]
        doubted += [name for given in columns if not is_surely_right(name, given)]
    assert doubted == []
    assert rec.table("values")["histogram"].null_count < rec.table("values").num_rows


def make_sinks(folder: Path) -> dict[str, tuple[Sink, Any]]:
    memory, held = MemoryRecording(META), MemoryRecording(META)
    writer = FolderWriter(folder / "run.modtrace", META)
    return {
        "memory": (memory, lambda: memory),
        "folder": (writer, lambda: FolderReader(folder / "run.modtrace")),
        "flight recorder": (FlightRecorder(held, 2, max_bytes=2**20), lambda: held),
    }


@pytest.mark.parametrize("kind", ["memory", "folder", "flight recorder"])
def test_negative_count_is_null_with_a_mark_and_one_warning_in_every_sink(kind, tmp_path):
    inner, read = make_sinks(tmp_path)[kind]
    sink = checked(inner)
    calls = {**calls_of(0, 3), "allocated_bytes": np.array([5, -16, 7])}
    with pytest.warns(
        modtrace.ModtraceWarning, match=r"^rows of 'calls': modtrace met an internal error"
    ) as warned:
        sink.write("calls", calls)
        sink.write("calls", {**calls, "step": [-1, 1, 1]})
        sink.write("scalars", {"step": [-2], "name": ["x"], "value": [1.0]})
        sink.write("steps", {"step": [0], "kind": ["train"]})
        sink.end_step(0, force=True)
    if isinstance(inner, FlightRecorder):
        inner.fire("OnSignal", "for a test", 0)
    sink.close()
    data = read()
    assert len(warned) == 1
    assert data.table("calls")["allocated_bytes"].to_pylist() == [5, None, 7, None, 7]
    assert data.table("calls")["step"].to_pylist() == [0, 0, 0, 1, 1]
    assert data.table("scalars").num_rows == 0
    assert data.meta.marks == (
        "calls lacks values from step 0 on, which break the rules of a recording: calls.allocated_bytes of row 1 is "
        "-16, and it is from 0 to 2**62",
        "scalars lacks values from step 3 on, which break the rules of a recording: scalars.step of row 0 is -2, and "
        "it is from 0 to 2**62",
    )


def test_strict_raises_and_names_table_column_row_and_value():
    memory = MemoryRecording(META)
    with pytest.raises(
        ValueError, match=r"'calls'.*: calls\.allocated_bytes of row 2 is -16, and it is from 0"
    ):
        checked(memory, strict=True).write("calls", {**calls_of(0, 3), "allocated_bytes": [5, 6, -16]})
    assert memory.rows == 0


def test_word_that_stands_in_a_dictionary_alone_takes_no_row_along():
    memory = MemoryRecording(META)
    roles = pa.DictionaryArray.from_arrays(pa.array([0, 0], pa.int32()), ["input", "no such word"])
    checked(memory, strict=True).write("sites", {"site_id": [0, 1], "role": roles, "slot": ["", ""]})
    assert memory.table("sites")["role"].to_pylist() == ["input", "input"]
    assert find_fault("sites", memory.table("sites")) is None


def test_run_goes_on_where_a_collector_errs(tmp_path, monkeypatch):
    def negative(of: Any) -> Any:
        return np.full(len(of.call_id), -7)

    made = op_rows.OpTables._op_columns
    monkeypatch.setattr(
        op_rows.OpTables, "_op_columns", lambda *args: {**made(*args), "bytes_read": negative(args[3])}
    )
    model = nn.Linear(2, 2)
    with (
        pytest.warns(modtrace.ModtraceWarning, match=r"^rows of 'ops': modtrace met"),
        modtrace.record(model, to=tmp_path / "run.modtrace", ops=True) as rec,
    ):
        for _ in range(3):
            model(torch.ones(1, 2))
    assert set(rec.table("ops")["bytes_read"].to_pylist()) == {None}
    assert rec.table("ops").num_rows == 6 + 3
    [mark] = rec.meta.marks
    assert mark.startswith(
        "ops lacks values from step 0 on, which break the rules of a recording: ops.bytes_read"
    )
    with (
        pytest.raises(ValueError, match=r"ops\.bytes_read of row 0 is -7"),
        modtrace.record(model, ops=True, strict=True),
    ):
        model(torch.ones(1, 2))
