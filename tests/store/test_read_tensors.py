"""What a reader of whole tensors does where files are replaced, damaged or none at all."""

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from helpers.raw_tensors import Given, given_tensor
from modtrace.errors import RecordingError
from modtrace.recording.meta import RunMeta
from modtrace.store.copy import write_recording
from modtrace.store.read_tensors import TensorFiles
from modtrace.store.reader import FolderReader
from modtrace.store.shard_file import ShardFile, index_file, shard_file, shard_files
from modtrace.store.writer import FolderWriter

TENSORS = [given_tensor("t", "uint8", (1000,), seed=each) for each in range(3)]


def write_tensors(path: Path, tensors: list[Given]) -> FolderWriter:
    """A row of `values` for each of them, closed."""
    writer = FolderWriter(path, RunMeta(run_id="r1"))
    for at, each in enumerate(tensors):
        blob = each.put(writer)
        writer.write("values", {"step": [0], "site_id": [at], "order": [at], "blob": [blob]})
    writer.close()
    return writer


def replace_in_place(file: Path, content: bytes) -> None:
    """Another content of the same length at the same place, a nanosecond later."""
    status = file.stat()
    file.write_bytes(content)
    os.utime(file, ns=(status.st_atime_ns, status.st_mtime_ns + 1))


def replace_by_another(file: Path, content: bytes) -> None:
    """Another file of the same length and the same time."""
    status = file.stat()
    other = file.with_suffix(".other")
    other.write_bytes(content)
    os.utime(other, ns=(status.st_atime_ns, status.st_mtime_ns))
    other.replace(file)


@pytest.mark.parametrize("replace", [replace_in_place, replace_by_another])
def test_file_that_was_replaced_is_read_anew(tmp_path: Path, replace: Callable[[Path, bytes], None]) -> None:
    given = TENSORS[0], given_tensor("t", "uint8", (10, 100), seed=1)
    one, other = (shard_file(write_tensors(tmp_path / str(each.shape), [each]).folder, 0) for each in given)
    tensors = TensorFiles(one.parent)
    blob = "tensors-00000.safetensors:000000.t"
    assert bytes(tensors.get(blob).data) == TENSORS[0].data
    replace(one, other.read_bytes())
    found = tensors.get(blob)
    assert (found.shape, bytes(found.data)) == ((10, 100), given[1].data)


@pytest.mark.parametrize("line", [b'{"name": "000001.t"}', b'{"name": 1e999}', b"[" * 100_000, b"\xff", b"1"])
def test_no_line_of_an_index_from_a_damaged_one_on_is_trusted(tmp_path: Path, line: bytes) -> None:
    writer = FolderWriter(tmp_path / "run", RunMeta())
    blobs = [str(each.put(writer)) for each in TENSORS]
    writer.wait_for_tensors()
    index = index_file(shard_file(writer.folder, 0))
    first, _, third = index.read_bytes().splitlines(keepends=True)
    index.write_bytes(first + line + b"\n" + third)
    tensors = TensorFiles(writer.folder)
    assert bytes(tensors.get(blobs[0]).data) == TENSORS[0].data
    for blob in blobs[1:]:
        with pytest.raises(RecordingError, match=r"it does not hold '00000[12]\.t'"):
            tensors.get(blob)
    writer.abandon()


@pytest.mark.parametrize("cut", [0, 4, 100])
def test_file_without_all_of_its_header_is_marked_as_cut(tmp_path: Path, cut: int) -> None:
    writer = write_tensors(tmp_path / "run", TENSORS)
    os.truncate(shard_file(writer.folder, 0), cut)
    assert FolderReader(writer.path).meta.marks == (
        "tensors-00000.safetensors is cut: the tensors at its end are missing",
    )


@pytest.mark.parametrize("blob", ["", "out", "../meta.json:out", "tensors-1.safetensors:out"])
def test_text_that_names_no_file_of_tensors_is_no_reference(tmp_path: Path, blob: str) -> None:
    reader = FolderReader(write_tensors(tmp_path / "run", TENSORS).path)
    with pytest.raises(RecordingError, match=r"no reference of a whole tensor\. Take one from the column"):
        reader.tensor(blob)


def test_copy_of_a_folder_with_a_damaged_file_says_what_is_missing(tmp_path: Path) -> None:
    writer = write_tensors(tmp_path / "run", TENSORS)
    shard_file(writer.folder, 0).write_bytes(b"no header")
    write_recording(FolderReader(writer.path), tmp_path / "copy")
    data = FolderReader(tmp_path / "copy")
    assert data.table("values")["blob"].to_pylist() == [None, None, None]
    assert any(each.startswith("3 whole tensors could not be copied: ") for each in data.meta.marks)


def test_files_are_in_the_order_of_their_numbers(tmp_path: Path) -> None:
    for number in (100_000, 3, 99_999):
        shard_file(tmp_path, number).touch()
    (tmp_path / "tensors-1.safetensors").touch()
    assert [each.name for each in shard_files(tmp_path)] == [
        "tensors-00003.safetensors",
        "tensors-99999.safetensors",
        "tensors-100000.safetensors",
    ]


def test_more_tensors_than_one_call_of_the_system_takes_are_written_at_once(tmp_path: Path) -> None:
    file = ShardFile(tmp_path, 0, 2**20)
    file.add([(f"{at:06d}.t", "uint8", (2,), memoryview(at.to_bytes(2, "big"))) for at in range(2000)])
    file.finish()
    tensors = TensorFiles(tmp_path)
    found = [bytes(tensors.get(f"tensors-00000.safetensors:{at:06d}.t").data) for at in range(2000)]
    assert found == [at.to_bytes(2, "big") for at in range(2000)]


@pytest.mark.parametrize("then", ["whole", "parts", "finish"])
def test_part_of_a_tensor_whose_rest_never_comes_is_taken_away(tmp_path: Path, then: str) -> None:
    file = ShardFile(tmp_path, 0, 1024)
    file.add([("000000.a", "uint8", (2,), memoryview(b"aa"))])
    file.add_part("000001.b", "uint8", (9,), memoryview(b"bbbbb"), is_first=True, is_last=False)
    if then == "whole":
        file.add([("000002.c", "uint8", (4,), memoryview(b"cccc"))])
    if then == "parts":
        file.add_part("000002.c", "uint8", (4,), memoryview(b"cc"), is_first=True, is_last=False)
        file.add_part("000002.c", "uint8", (4,), memoryview(b"cc"), is_first=False, is_last=True)
    file.finish()
    assert file.path.read_bytes()[8 + 1024 :] == (b"aa" if then == "finish" else b"aacccc")
    tensors = TensorFiles(tmp_path)
    assert bytes(tensors.get("tensors-00000.safetensors:000000.a").data) == b"aa"
    if then != "finish":
        assert bytes(tensors.get("tensors-00000.safetensors:000002.c").data) == b"cccc"
