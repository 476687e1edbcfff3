"""What stands in the place of a recording's file, and JSON that nobody should parse."""

import json
import os
import shutil
import socket
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from helpers.command_line import run_command
from helpers.raw_tensors import given_tensor
from helpers.typed_rows import MS, expected, rows, write_step
from modtrace.errors import DamagedRecordingError, RecordingError
from modtrace.recording.json_text import parse_json
from modtrace.recording.meta import RunMeta
from modtrace.recording.options.tensor_options import TensorOptions
from modtrace.store.reader import FolderReader
from modtrace.store.shard_file import shard_file
from modtrace.store.writer import FolderWriter

SHARD = "tensors-00000.safetensors"
DEEP = ("[" * 100_000).encode()
BLOB = f"{SHARD}:000000.t"


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """A recording of two steps with a whole tensor, that was closed."""
    writer = FolderWriter(tmp_path / "run.modtrace", RunMeta(run_id="r1"))
    assert given_tensor("t", "float32", (2, 3)).put(writer) == BLOB
    for step in range(2):
        write_step(writer, step, step * 200 * MS)
    writer.close()
    return tmp_path / "run.modtrace"


def put_fifo(file: Path) -> str:
    os.mkfifo(file)
    return "a FIFO"


def put_folder(file: Path) -> str:
    file.mkdir()
    return "a folder"


def put_device(file: Path) -> str:
    file.symlink_to("/dev/zero")
    return "a device"


def put_socket(file: Path) -> str:
    with socket.socket(socket.AF_UNIX) as made:
        made.bind(os.path.relpath(file))  # an address has at most 107 bytes
    return "a socket"


@pytest.fixture(params=[put_fifo, put_folder, put_device, put_socket])
def put(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, path: Path
) -> Iterator[Callable[[Path], str]]:
    monkeypatch.chdir(path)
    yield request.param


@pytest.mark.parametrize("name", ["recording.json", "rank-00000/calls.arrow"])
def test_what_is_no_regular_file_is_not_opened(path: Path, name: str, put: Callable[[Path], str]) -> None:
    """A FIFO held the reader for ever, `/dev/zero` ate all memory."""
    file = path / name
    file.unlink()
    kind = put(file)
    with pytest.raises(DamagedRecordingError) as caught:
        FolderReader(path).table("calls")
    assert (
        str(caught.value) == f"{file}: a regular file is expected, and {kind} is there. Copy the file again."
    )


def test_meta_data_and_tensors_that_are_no_regular_file_are_marked_and_not_opened(
    path: Path, put: Callable[[Path], str]
) -> None:
    for name, what in ((SHARD, "cannot be read"), ("meta.json", "cannot be understood")):
        file = path / "rank-00000" / name
        file.unlink()
        why = f"{file}: a regular file is expected, and {put(file)} is there. Copy the file again."
        reader = FolderReader(path)
        assert rows(reader) == expected(2)
        assert reader.meta.marks == (f"{name} {what} ({why})",)
        if name == SHARD:
            with pytest.raises(DamagedRecordingError) as caught:
                reader.tensor(BLOB)
            assert str(caught.value) == why


def test_link_to_a_regular_file_is_followed(path: Path) -> None:
    """git-annex and DVC keep large files so."""
    for name in ("calls.arrow", SHARD, "meta.json"):
        file = path / "rank-00000" / name
        file.rename(path / name)
        file.symlink_to(path / name)
    reader = FolderReader(path)
    assert rows(reader) == expected(2)
    assert reader.tensor(BLOB).shape == (2, 3)
    assert reader.meta.complete


def test_system_that_cannot_read_at_an_offset_reads_the_same(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Windows has no `preadv`."""
    monkeypatch.delattr("os.preadv")
    reader = FolderReader(path)
    assert rows(reader) == expected(2)
    assert reader.tensor(BLOB).shape == (2, 3)


def test_link_that_leads_to_itself_is_told(path: Path) -> None:
    file = path / "rank-00000/calls.arrow"
    file.unlink()
    file.symlink_to(file.name)
    with pytest.raises(
        RecordingError, match=r"calls\.arrow: cannot be read: Too many levels of symbolic links\."
    ):
        FolderReader(path).table("calls")


def test_file_without_end_is_not_read(path: Path) -> None:
    """A sparse file of a terabyte takes no room, and would take all memory."""
    file = path / "recording.json"
    os.truncate(file, 2**40)
    with pytest.raises(DamagedRecordingError) as caught:
        FolderReader(path)
    assert str(caught.value) == (
        f"{file}: a file of 1099511627776 bytes, and at most 1048576 are read of it. Copy it again."
    )


def test_command_says_so_and_exits_with_2(
    path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    file = path / "recording.json"
    file.write_bytes(DEEP)
    assert run_command(monkeypatch, "show", str(path)) == 2
    assert capsys.readouterr().err == (
        f"modtrace: error: {file}: cannot be understood (100000 bytes; ValueError('it is nested more than 200 levels "
        'deep\')). Put {"schema_version": 2} into it to read the tables beside it.\n'
    )


# --- JSON


@pytest.mark.parametrize("depth", [201, 100_000])
@pytest.mark.parametrize(("begin", "end"), [("[", "]"), ('{"a":', "}")])
def test_brackets_without_end_are_a_value_error(depth: int, begin: str, end: str) -> None:
    with pytest.raises(ValueError, match=r"^it is nested more than 200 levels deep$"):
        parse_json(begin * depth + "1" + end * depth)


def test_200_levels_are_read() -> None:
    assert json.dumps(parse_json("[" * 200 + "]" * 200)) == "[" * 200 + "]" * 200


@pytest.mark.parametrize("text", [b"\xff", b"\xfe\xff[\x00]", b"", b"[1", '{"a": 1, "a": 2}', "1" * 5000])
def test_what_is_no_json_is_a_value_error(text: bytes | str) -> None:
    with pytest.raises(ValueError):
        parse_json(text)


def test_surrogate_that_stands_alone_becomes_a_question_mark() -> None:
    assert parse_json(r'{"\udc80": ["a\ud800b", "\ud83e\udd8a"]}') == {"?": ["a?b", "🦊"]}


@pytest.mark.parametrize(
    ("content", "why"),
    [
        (b"", "not JSON: Expecting value: line 1 column 1 (char 0)"),
        (DEEP, "not JSON: it is nested more than 200 levels deep"),
        (b"[]", "a JSON object is expected, and a list is there"),
        (b'{"rank": "zero"}', "rank is 'zero', and a value of type int is expected"),
        (b'{"rank": -1}', "rank is -1, and a number from 0 to 2**63 is expected"),
        (
            b'{"clock_time_ns": 9223372036854775808}',
            "clock_time_ns is 9223372036854775808, and a number from 0 to 2**63 is expected",
        ),
        (b'{"argv": "train.py"}', "argv is 'train.py', and a value of type list is expected"),
        (b'{"argv": ["a", 1]}', "argv holds something else than texts"),
        (b'{"ended": [["calls"]]}', "ended holds something else than texts"),
        (b'{"world_size": true}', "world_size is True, and a value of type int is expected"),
    ],
)
def test_meta_that_is_damaged_is_a_mark(path: Path, content: bytes, why: str) -> None:
    (path / "rank-00000/meta.json").write_bytes(content)
    reader = FolderReader(path)
    assert rows(reader) == expected(2)
    assert reader.meta.marks == (f"meta.json cannot be understood ({why})",)
    assert (reader.meta.run_id, reader.meta.complete) == ("r1", False)


# --- the header of a file of tensors


def put_header(path: Path, text: str) -> FolderReader:
    file = path / "rank-00000" / SHARD
    data = file.read_bytes()
    data = data[8 + int.from_bytes(data[:8], "little") :]
    file.write_bytes(len(text.encode()).to_bytes(8, "little") + text.encode() + data)
    return FolderReader(path)


def entry(**changed: object) -> str:
    return json.dumps({"000000.t": {"dtype": "F32", "shape": [2, 3], "data_offsets": [0, 24], **changed}})


def test_header_that_is_right_is_read(path: Path) -> None:
    assert put_header(path, entry()).tensor(BLOB).shape == (2, 3)


@pytest.mark.parametrize(
    ("header", "why"),
    [
        ("[" * 100_000, "it is nested more than 200 levels deep"),
        (entry(data_offsets=[0, float("inf")]), "'float32' of shape (2, 3) from 0 to inf"),
        (entry(data_offsets=[0, "24"]), "'float32' of shape (2, 3) from 0 to '24'"),
        (entry(data_offsets=[-24, 0]), "24 bytes at -24 for float32 of shape (2, 3)"),
        (entry(data_offsets=[0, 25]), "25 bytes at 0 for float32 of shape (2, 3)"),
        (entry(shape=[2.0, 3]), "'float32' of shape (2.0, 3) from 0 to 24"),
        (entry(shape=[-2, -3]), "24 bytes at 0 for float32 of shape (-2, -3)"),
        (
            entry(shape=[0, 2**62, 2**62], data_offsets=[0, 0]),
            f"no array has the shape (0, {2**62}, {2**62})",
        ),
        (entry(shape=[1] * 65, data_offsets=[0, 4]), f"no array has the shape {(1,) * 65}"),
        (entry(dtype=["F32"]), "unhashable type: 'list'"),
        ('{"a": 1, "a": 2}', "the name 'a' occurs twice in an object"),
        ("[]", "pop expected at most 1 argument, got 2"),
        (
            '{"a": {"dtype": "U8", "shape": [4], "data_offsets": [0, 4]},'
            ' "b": {"dtype": "U8", "shape": [4], "data_offsets": [3, 7]}}',
            "'b' lies over another",
        ),
    ],
)
def test_header_that_is_wrong_is_told(path: Path, header: str, why: str) -> None:
    header = header.replace("Infinity", "1e999")
    reader = put_header(path, header)
    file = path / "rank-00000" / SHARD
    with pytest.raises(DamagedRecordingError) as caught:
        reader.tensor(BLOB)
    assert str(caught.value) == (
        f"{file}: not a safetensors file ({file.stat().st_size} bytes; {why}). Copy it again."
    )


@pytest.mark.parametrize("length", [2**63, 2**64 - 1, 10**9])
def test_header_that_is_longer_than_the_file_is_told(path: Path, length: int) -> None:
    file = path / "rank-00000" / SHARD
    file.write_bytes(length.to_bytes(8, "little") + file.read_bytes()[8:])
    with pytest.raises(DamagedRecordingError, match=rf"a header of {length} bytes in a file of "):
        FolderReader(path).tensor(BLOB)


def test_tensor_of_a_file_that_is_not_finished_is_not_mapped(tmp_path: Path) -> None:
    """What its writer takes away again is gone: whoever had mapped it was killed (SIGBUS)."""
    writer = FolderWriter(tmp_path / "run", RunMeta())
    given = given_tensor("t", "uint8", (9,))
    blob = str(given.put(writer))
    writer.wait_for_tensors()
    reader = FolderReader(tmp_path / "run")
    raw = reader.tensor(blob)
    os.truncate(shard_file(writer.folder, 0), 0)
    assert bytes(raw.data) == given.data
    with pytest.raises(DamagedRecordingError, match="cut at byte 0"):
        reader.tensor(blob)
    writer.abandon()


# --- files that are gone, and runs that were killed while they began


def write_shards(path: Path) -> FolderWriter:
    """A recording whose three tensors lie in three files, and that is not closed."""
    writer = FolderWriter(
        path, RunMeta(run_id="r1"), tensors=TensorOptions(max_bytes=2**16, shard_bytes=4096)
    )
    for _ in range(3):
        given_tensor("t", "uint8", (4000,)).put(writer)
    writer.wait_for_tensors()
    return writer


@pytest.mark.parametrize("number", [0, 1, 2])
def test_file_of_tensors_that_was_deleted_while_the_run_went_on_is_marked(
    tmp_path: Path, number: int
) -> None:
    writer = write_shards(tmp_path / "run")
    shard_file(writer.folder, number).unlink()
    writer.close()
    assert FolderReader(writer.path).meta.marks == (f"tensors-0000{number}.safetensors is missing",)


@pytest.mark.parametrize("number", [0, 1, 2])
def test_file_of_tensors_that_was_deleted_before_the_run_was_killed_is_marked(
    tmp_path: Path, number: int
) -> None:
    writer = write_shards(tmp_path / "run")
    shard_file(writer.folder, number).unlink()
    writer.abandon()
    assert FolderReader(writer.path).meta.marks == (
        "not closed: the process ended or is still running; no step is complete",
        f"tensors-0000{number}.safetensors is missing",
    )


def test_recording_that_is_deleted_while_it_is_open_is_told(path: Path) -> None:
    reader = FolderReader(path)
    assert reader.meta.complete
    shutil.rmtree(path)
    with pytest.raises(RecordingError) as caught:
        reader.meta  # noqa: B018
    assert str(caught.value) == (
        f"{path}/rank-00000: cannot be read: No such file or directory. Check that you may read it."
    )


def test_files_that_can_never_have_been_made_are_not_named_one_by_one(path: Path) -> None:
    file = path / "rank-00000/meta.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "shards": 2**62}))
    marks = FolderReader(path).meta.marks
    assert len(marks) == 11
    assert marks[0] == "tensors-00001.safetensors is missing"
    assert marks[10] == f"{2**62 - 11} more files of whole tensors are missing"


def test_run_that_was_killed_before_its_header_was_in_place_is_told(tmp_path: Path) -> None:
    path = tmp_path / "run.modtrace"
    path.mkdir()
    (path / "recording.json.4711.tmp").write_text("{")
    with pytest.raises(DamagedRecordingError) as caught:
        FolderReader(path)
    assert str(caught.value) == (
        f"{path}: the run ended while it made this recording, or is about to make it: recording.json is not in its "
        "place yet. Record again."
    )


def test_another_run_takes_the_place_of_one_that_was_killed_so(tmp_path: Path) -> None:
    path = tmp_path / "run.modtrace"
    path.mkdir()
    (path / "recording.json.4711.tmp").write_text("{")
    FolderWriter(path, RunMeta(run_id="r2")).close()
    assert FolderReader(path).meta.run_id == "r2"


def test_run_that_was_killed_while_it_replaced_another_can_be_replaced(tmp_path: Path) -> None:
    """Files that are not of the recording had stayed, and the folder was no recording any more."""
    path = tmp_path / "run.modtrace"
    path.mkdir()
    (path / "recording.json.4711.tmp").write_text("{")
    (path / "notes.txt").write_text("mine")
    FolderWriter(path, RunMeta(run_id="r2"), overwrite=True).close()
    assert FolderReader(path).meta.run_id == "r2"
    assert sorted(each.name for each in path.iterdir()) == ["notes.txt", "rank-00000", "recording.json"]


@pytest.mark.parametrize("number", range(3))
def test_run_killed_before_any_of_its_first_renames_is_told(
    tmp_path: Path, number: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The kill is an exception here, in the place of the n-th rename."""
    replaced = os.replace
    left = [number]

    def replace(*names: Path) -> None:
        left[0] -= 1
        if left[0] < 0:
            raise KeyboardInterrupt
        replaced(*names)

    monkeypatch.setattr(os, "replace", replace)
    writer = None
    try:
        writer = FolderWriter(tmp_path / "run", RunMeta(run_id="r1"))
        write_step(writer, 0, 0, force=True)
    except KeyboardInterrupt:
        pass
    monkeypatch.undo()
    if number == 0:
        with pytest.raises(DamagedRecordingError, match="the run ended while it made this recording"):
            FolderReader(tmp_path / "run")
    elif number == 1:
        assert FolderReader(tmp_path / "run").meta.marks == ("meta.json is missing",)
    else:
        assert writer is not None
        assert rows(FolderReader(writer.path)) == expected(1)
        writer.abandon()
