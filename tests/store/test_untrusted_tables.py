"""Tables that somebody else may have written: whatever is wrong is named, with file, batch and column."""

import os
import struct
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from pyarrow import ipc

from helpers.typed_rows import MS, expected, rows, write_step
from modtrace.errors import DamagedRecordingError
from modtrace.recording.arrow.batches import to_batch
from modtrace.recording.meta import RunMeta
from modtrace.recording.schema import schema
from modtrace.store.arrow_messages import find_messages
from modtrace.store.read_stream import read_stream, read_table
from modtrace.store.reader import FolderReader
from modtrace.store.writer import FolderWriter

MODULES = {
    "module_id": [0, 1, 2],
    "root_id": [0, 0, 0],
    "path": ["", "blocks", "blocks.0"],
    "raw_path": ["", "blocks", "blocks.0"],
    "type": ["Net", "ModuleList", "Block"],
    "parent_id": [None, 0, 1],
}
CALLS = {"call_id": [0, 1], "step": [0, 0], "phase": ["forward", "backward"], "start_ns": [0, 1]}
SITES = {"site_id": [0, 1], "role": ["output", "input"], "slot": ["", ""]}
VALUES = {"step": [0], "site_id": [0], "order": [0], "shape": [[2, 3]], "dtype": ["float32"], "numel": [6]}


def write_table(path: Path, *batches: pa.RecordBatch, compression: str | None = None) -> Path:
    options = ipc.IpcWriteOptions(compression=compression)
    with (
        pa.OSFile(str(path), "wb") as file,
        ipc.new_stream(file, batches[0].schema, options=options) as stream,
    ):
        for each in batches:
            stream.write_batch(each)
    return path


def why_not(path: Path, table: str) -> str:
    """What is said of a file that cannot be read, without what is to be done."""
    with pytest.raises(DamagedRecordingError) as caught:
        read_table(path, table)
    text = str(caught.value)
    assert text.startswith(f"{path}: ")
    return text.removeprefix(f"{path}: ").partition(". Copy the file again")[0]


def closed(tmp_path: Path) -> Path:
    """The folder of a rank that was closed."""
    writer = FolderWriter(tmp_path / "run.modtrace", RunMeta(run_id="r1"))
    for step in range(3):
        write_step(writer, step, step * 200 * MS)
    writer.close()
    return writer.folder


# --- what Arrow's own validation finds


def test_string_offset_that_leads_out_of_the_file_is_found(tmp_path: Path) -> None:
    """`modtrace show` died of SIGSEGV."""
    path = write_table(tmp_path / "modules.arrow", to_batch("modules", MODULES))
    content = path.read_bytes()
    offsets = struct.pack("<4i", 0, 0, 6, 14)  # of `path`
    assert content.count(offsets) == 2  # and of `raw_path`
    path.write_bytes(content.replace(offsets, struct.pack("<4i", 0, 0, 2_000_000_000, 14), 1))
    assert why_not(path, "modules") == (
        "batch 0 is damaged: column 'path': Offset invariant failure: offset for slot 2 out of bounds: 2000000000 > 14"
    )


def test_code_that_no_word_has_is_found(tmp_path: Path) -> None:
    codes = pa.array([0, 7], pa.int8())
    phases = pa.DictionaryArray.from_arrays(codes, pa.array(["forward"]), safe=False)
    batch = to_batch("calls", CALLS)
    bad = batch.set_column(batch.schema.get_field_index("phase"), schema("calls").field("phase"), phases)
    path = write_table(tmp_path / "calls.arrow", batch, bad)
    assert why_not(path, "calls").startswith("batch 1 is damaged: column 'phase': ")


def test_text_that_is_no_unicode_is_found(tmp_path: Path) -> None:
    path = write_table(tmp_path / "modules.arrow", to_batch("modules", MODULES))
    path.write_bytes(path.read_bytes().replace(b"ModuleList", b"Module\xff\xfest"))
    assert why_not(path, "modules").startswith("batch 0 is damaged: column 'type': Invalid UTF8 sequence")


# --- what the rules of the tables find


@pytest.mark.parametrize(
    ("table", "columns", "changed", "why"),
    [
        ("calls", CALLS, {"call_id": [-1, 1]}, "column 'call_id' is -1, and it is from 0 to 2**62 (row 0)"),
        (
            "calls",
            CALLS,
            {"start_ns": [0, 2**62]},
            f"column 'start_ns' is {2**62}, and it is from 0 to 2**62 (row 1)",
        ),
        (
            "calls",
            CALLS,
            {"thread": [0, 2**30]},
            f"column 'thread' is {2**30}, and it is from 0 to 2**30 (row 1)",
        ),
        (
            "sites",
            SITES,
            {"role": ["output", ""]},
            "column 'role' has the word '', and there are input, output, grad_output, grad_input, parameter, "
            "parameter_grad, buffer, optimizer_state, update, op_output, leaf, loss (row 1)",
        ),
        (
            "sites",
            SITES,
            {"site_id": [2**24 + 2, 1]},
            f"column 'site_id' is {2**24 + 2}, and the table has 2 rows (row 0)",
        ),
        (
            "calls",
            CALLS,
            {"parent_call_id": [None, 1]},
            "column 'parent_call_id' leads from call_id 1 into a circle (row 1)",
        ),
        (
            "calls",
            CALLS,
            {"parent_call_id": [1, 0]},
            "column 'parent_call_id' leads from call_id 0 into a circle (row 0)",
        ),
        (
            "modules",
            MODULES,
            {"parent_id": [2, 0, 1]},
            "column 'parent_id' leads from module_id 0 into a circle (row 0)",
        ),
        (
            "modules",
            MODULES,
            {"parent_id": [None, 2, 1]},
            "column 'parent_id' leads from module_id 1 into a circle (row 1)",
        ),
        ("values", VALUES, {"shape": [[2, None]]}, "column 'shape' holds a null (row 0)"),
        ("values", VALUES, {"sample": [[1.0, None]]}, "column 'sample' holds a null (row 0)"),
        ("values", VALUES, {"shape": [[2, -3]]}, "column 'shape' holds a negative number (row 0)"),
        ("values", VALUES, {"histogram": [[1, 2]]}, "column 'histogram' has not 256 counts (row 0)"),
        ("values", VALUES, {"hash": [b"123456789"]}, "column 'hash' has not 8 bytes (row 0)"),
        ("values", VALUES, {"sketch": [[1.0]]}, "column 'sketch' has not 64 numbers (row 0)"),
        (
            "sites",
            SITES,
            {"role": ["output", "wild"]},
            "column 'role' has the word 'wild', and there are input, output, grad_output, grad_input, parameter, "
            "parameter_grad, buffer, optimizer_state, update, op_output, leaf, loss (row 1)",
        ),
    ],
)
def test_row_that_breaks_a_rule_is_found(
    tmp_path: Path, table: str, columns: dict[str, Any], changed: dict[str, Any], why: str
) -> None:
    good, bad = to_batch(table, columns), to_batch(table, {**columns, **changed})
    assert read_table(write_table(tmp_path / "good.arrow", good), table).num_rows == good.num_rows
    assert why_not(write_table(tmp_path / "bad.arrow", bad), table) == f"batch 0 is damaged: {why}"


def test_null_where_none_may_be_is_found_in_its_batch(tmp_path: Path) -> None:
    good = to_batch("calls", CALLS)
    at = good.schema.get_field_index("step")
    bad = good.set_column(at, schema("calls").field(at), pa.array([None, 0], pa.int32()))
    path = write_table(tmp_path / "calls.arrow", good, bad, good)
    assert why_not(path, "calls") == "batch 1 is damaged: column 'step' is null, and must not be (row 0)"


def test_unknown_phase_is_found(tmp_path: Path) -> None:
    batch = to_batch("calls", CALLS)
    at = batch.schema.get_field_index("phase")
    bad = batch.set_column(
        at, "phase", pa.array(["forward", "sideways"]).dictionary_encode().cast(batch.schema.types[at])
    )
    path = write_table(tmp_path / "calls.arrow", bad)
    assert why_not(path, "calls") == (
        "batch 0 is damaged: column 'phase' has the word 'sideways', and there are forward, backward, recompute, "
        "optimizer (row 1)"
    )


def test_chain_of_modules_may_begin_with_one_that_is_missing(tmp_path: Path) -> None:
    """Of a killed run the last rows of some tables are missing."""
    path = write_table(
        tmp_path / "modules.arrow", to_batch("modules", {**MODULES, "parent_id": [None, 7, 1]})
    )
    assert read_table(path, "modules")["parent_id"].to_pylist() == [None, 7, 1]


def test_call_may_lie_in_one_of_a_larger_id(tmp_path: Path) -> None:
    """The recompute of a reentrant checkpoint gets its number after what it runs."""
    path = write_table(tmp_path / "calls.arrow", to_batch("calls", {**CALLS, "parent_call_id": [1, None]}))
    assert read_table(path, "calls")["parent_call_id"].to_pylist() == [1, None]


def test_last_row_of_a_module_counts(tmp_path: Path) -> None:
    columns = {name: [*values, values[0]] for name, values in MODULES.items()}
    path = write_table(
        tmp_path / "modules.arrow", to_batch("modules", {**columns, "parent_id": [2, 0, 1, None]})
    )
    assert read_table(path, "modules").num_rows == 4


# --- what a stream may not hold


def _give_type(file: bytearray, message: int, header_type: int) -> None:
    """Changes the type of the message that begins at a byte; Message.fbs has it in field 1."""
    table = message + 8 + struct.unpack_from("<I", file, message + 8)[0]
    vtable = table - struct.unpack_from("<i", file, table)[0]
    file[table + struct.unpack_from("<H", file, vtable + 4 + 2)[0]] = header_type


@pytest.mark.parametrize("header_type", [0, 1, 4, 5, 255])
def test_batch_of_another_type_is_not_left_out_without_a_word(tmp_path: Path, header_type: int) -> None:
    batch = to_batch("uses", {"consumer_op": [0, 1], "slot": ["a", "b"], "tensor_id": [0, 1]})
    path = write_table(tmp_path / "uses.arrow", batch, batch)
    file = bytearray(path.read_bytes())
    second = list(find_messages(memoryview(file)).batches)[1]
    _give_type(file, second, header_type)
    path.write_bytes(file)
    assert why_not(path, "uses") == f"batch 1 is damaged: a message is of type {header_type} (byte {second})"


@pytest.mark.parametrize("header_type", [0, 2, 3, 4])
def test_stream_that_does_not_begin_with_a_schema_is_none(tmp_path: Path, header_type: int) -> None:
    path = write_table(tmp_path / "calls.arrow", to_batch("calls", CALLS))
    file = bytearray(path.read_bytes())
    _give_type(file, 0, header_type)
    path.write_bytes(file)
    assert why_not(path, "calls") == f"not an Arrow stream ({len(file)} bytes)"


@pytest.mark.parametrize("compression", ["lz4", "zstd"])
def test_compressed_stream_is_refused_before_memory_is_asked_for(tmp_path: Path, compression: str) -> None:
    batch = to_batch("calls", {**CALLS, "nth": [0, 0]})
    path = write_table(tmp_path / "calls.arrow", batch, compression=compression)
    pool = pa.default_memory_pool()
    before = pool.bytes_allocated()
    assert why_not(path, "calls").endswith("a message is compressed (byte 1504)")
    assert pool.bytes_allocated() == before


def test_end_of_stream_before_the_end_of_the_file_is_found(tmp_path: Path) -> None:
    """The batches behind it were left out without a word."""
    batch = to_batch("calls", CALLS)
    path = write_table(tmp_path / "calls.arrow", batch, batch)
    size = path.stat().st_size
    end = b"\xff\xff\xff\xff\x00\x00\x00\x00"
    path.write_bytes(path.read_bytes() + end)
    assert why_not(path, "calls") == f"batch 2 is damaged: the stream ends at byte {size} of {size + 8}"


def test_column_of_another_type_is_told(tmp_path: Path) -> None:
    path = write_table(
        tmp_path / "scalars.arrow", pa.record_batch({"step": ["0"], "name": ["a"], "value": [1.0]})
    )
    with pytest.raises(DamagedRecordingError) as caught:
        read_table(path, "scalars")
    assert str(caught.value) == (
        f"{path}: its columns are not those of the table: step is of type string, and int32 is expected. "
        "Delete the file to read the other tables."
    )


def test_zeros_at_the_end_are_what_a_power_failure_leaves(tmp_path: Path) -> None:
    file = closed(tmp_path) / "calls.arrow"
    whole = file.read_bytes()[:-8]
    file.write_bytes(whole + bytes(4096))
    reader = FolderReader(tmp_path / "run.modtrace")
    assert rows(reader) == expected(3)
    assert reader.meta.marks == ("calls.arrow is cut: the rows at its end are missing",)


# --- what is marked


def test_damaged_table_is_marked_in_a_recording_that_was_closed(tmp_path: Path) -> None:
    file = closed(tmp_path) / "calls.arrow"
    file.write_bytes(b"<html>404</html>")
    reader = FolderReader(tmp_path / "run.modtrace")
    assert reader.table("steps").num_rows == 3
    assert reader.meta.marks == (
        f"calls.arrow cannot be read ({file}: not an Arrow stream (16 bytes). Copy the file again, or delete it to "
        "read the other tables.)",
    )


# --- files that change while they are read


def test_table_of_a_run_that_is_not_closed_does_not_hang_on_its_file(tmp_path: Path) -> None:
    """A mapped file that becomes shorter kills whoever looks at it (SIGBUS)."""
    writer = FolderWriter(tmp_path / "run.modtrace", RunMeta(run_id="r1"))
    write_step(writer, 0, 0, force=True)
    table = FolderReader(writer.path).table("calls")
    os.truncate(writer.folder / "calls.arrow", 0)
    assert table.to_pylist() == expected(1)["calls"]
    writer.abandon()


def test_file_that_becomes_shorter_while_it_is_opened_is_not_mapped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = closed(tmp_path) / "calls.arrow"
    stat = Path.stat

    def shorten_first(path: Path, **options: Any) -> os.stat_result:
        os.truncate(file, 0)
        return stat(path, **options)

    with monkeypatch.context() as patched:
        patched.setattr(Path, "stat", shorten_first)
        table = read_stream(file, schema("calls"), is_final=True)
    assert table.num_rows == 0
