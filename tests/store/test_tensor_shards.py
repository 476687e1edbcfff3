"""Whole tensors lie in safetensors files that other programs read, one file behind the other."""

import os
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.numpy import load_file as load_arrays
from safetensors.torch import load_file

from helpers.raw_tensors import Given, given_tensor, given_tensors
from modtrace.errors import DamagedRecordingError, RecordingError
from modtrace.recording.meta import RunMeta
from modtrace.recording.options.tensor_options import TensorOptions
from modtrace.store.reader import FolderReader
from modtrace.store.shard_file import index_file
from modtrace.store.writer import FolderWriter

META = RunMeta(run_id="r1")


def write_tensors(
    path: Path, tensors: list[Given], options: TensorOptions | None = None
) -> tuple[FolderReader, list[str | None]]:
    writer = FolderWriter(path, META, tensors=options)
    blobs = [each.put(writer) for each in tensors]
    writer.close()
    return FolderReader(path), blobs


def files(reader: FolderReader) -> list[str]:
    return sorted(each for each in os.listdir(reader.folder) if each.startswith("tensors-"))


def test_file_is_read_by_the_library_safetensors(tmp_path: Path) -> None:
    writer = FolderWriter(tmp_path / "run.modtrace", META)
    weight = np.array([[1.0, -2.0, 3.5]], np.float32)
    half = torch.tensor([1.0, float("nan"), -0.0], dtype=torch.bfloat16)
    writer.put_tensor("blocks.0.attn.weight", weight, "float32", (1, 3), step=7)
    writer.put_tensor("é", half.view(torch.uint16).numpy(), "bfloat16", (3,), step=7)
    writer.put_tensor("loss", np.float64(0.25), "float64", (), step=7)
    writer.put_tensor("none", np.zeros((0, 3), np.int64), "int64", (0, 3), step=7)
    writer.close()
    loaded = load_file(writer.folder / "tensors-00000.safetensors")
    assert sorted(loaded) == ["000000.blocks.0.attn.weight", "000001.é", "000002.loss", "000003.none"]
    assert loaded["000000.blocks.0.attn.weight"].tolist() == [[1.0, -2.0, 3.5]]
    assert torch.equal(loaded["000001.é"].view(torch.int16), half.view(torch.int16))
    assert loaded["000002.loss"].item() == 0.25
    assert loaded["000003.none"].shape == (0, 3)
    assert files(FolderReader(writer.path)) == ["tensors-00000.safetensors"]


@pytest.mark.parametrize(
    ("dtype", "stored", "shape"),
    [
        ("complex64", torch.complex64, (2, 3)),
        ("float8_e4m3fn", torch.float8_e4m3fn, (2, 3)),
        ("float8_e8m0fnu", torch.float8_e8m0fnu, (2, 3)),
        ("uint16", torch.uint16, (2, 3)),
        ("bool", torch.bool, (2, 3)),
        ("complex128", torch.float64, (2, 3, 2)),
        ("complex32", torch.float16, (2, 3, 2)),
        ("float4_e2m1fn_x2", torch.uint8, (2, 3, 1)),
        ("a_dtype_of_the_future", torch.uint8, (2, 3, 2)),
    ],
)
def test_dtype_that_safetensors_lacks_is_stored_as_parts(
    tmp_path: Path, dtype: str, stored: torch.dtype, shape: tuple[int, ...]
) -> None:
    reader, [blob] = write_tensors(tmp_path / "run.modtrace", [given_tensor("t", dtype, (2, 3))])
    [loaded] = load_file(reader.folder / "tensors-00000.safetensors").values()
    assert (loaded.dtype, tuple(loaded.shape)) == (stored, shape)
    raw = reader.tensor(blob)
    assert (raw.dtype, raw.shape) == (dtype, (2, 3))


@settings(max_examples=30, deadline=None)
@given(
    tensors=st.lists(given_tensors(), min_size=1, max_size=30),
    max_bytes=st.integers(4096, 20_000),
    shard_bytes=st.integers(4096, 20_000),
)
def test_every_file_is_whole_for_the_library(tensors: list[Given], max_bytes: int, shard_bytes: int) -> None:
    options = TensorOptions(max_bytes=max_bytes, shard_bytes=shard_bytes)
    with TemporaryDirectory() as folder:
        reader, blobs = write_tensors(Path(folder) / "run.modtrace", tensors, options)
        loaded = {f"{each}:{name}" for each in files(reader) for name in load_file(reader.folder / each)}
        assert loaded == set(blobs)
        assert [bytes(reader.tensor(blob).data) for blob in blobs] == [each.data for each in tensors]
        assert reader.meta.marks == ()


def test_file_that_is_full_is_followed_by_another(tmp_path: Path) -> None:
    tensors = [given_tensor("t", "uint8", (2000,), seed=each) for each in range(9)]
    options = TensorOptions(shard_bytes=5000)
    reader, blobs = write_tensors(tmp_path / "run.modtrace", tensors, options)
    assert files(reader) == [f"tensors-0000{each}.safetensors" for each in range(5)]
    assert blobs == [f"tensors-0000{each // 2}.safetensors:00000{each}.t" for each in range(9)]
    sizes = [(reader.folder / each).stat().st_size for each in files(reader)]
    assert sizes == [8 + 65_536 + 4000] * 4 + [8 + 65_536 + 2000]  # not more room for as many names


def test_file_of_tensors_without_elements_is_not_full(tmp_path: Path) -> None:
    tensors = [given_tensor("t", "uint8", (size,)) for size in (0, 5000, 1)]
    _, blobs = write_tensors(tmp_path / "run.modtrace", tensors, TensorOptions(shard_bytes=4096))
    assert blobs == [
        "tensors-00000.safetensors:000000.t",
        "tensors-00000.safetensors:000001.t",
        "tensors-00001.safetensors:000002.t",
    ]


def test_many_names_start_a_file_with_more_room_for_them(tmp_path: Path) -> None:
    tensors = [given_tensor("n" * 1000, "uint8", (1,), seed=each % 2) for each in range(400)]
    reader, blobs = write_tensors(tmp_path / "run.modtrace", tensors)
    sizes = [(reader.folder / each).stat().st_size for each in files(reader)]
    kib = [size // 1024 for size in sizes]
    assert kib == [64, 256, 1024]
    assert [bytes(reader.tensor(blob).data) for blob in blobs] == [each.data for each in tensors]


def test_name_longer_than_any_header_has_room_for_it(tmp_path: Path) -> None:
    tensors = [given_tensor("n" * 300_001, "uint8", (1,)), given_tensor("m", "uint8", (1,))]
    reader, blobs = write_tensors(tmp_path / "run.modtrace", tensors)
    assert [bytes(reader.tensor(blob).data) for blob in blobs] == [each.data for each in tensors]
    assert [list(load_arrays(reader.folder / each)) for each in files(reader)] == [
        ["000000." + "n" * 300_001],
        ["000001.m"],
    ]
    assert files(reader) == ["tensors-00000.safetensors", "tensors-00001.safetensors"]
    header = (reader.folder / "tensors-00000.safetensors").read_bytes()[:8]
    assert int.from_bytes(header, "little") % 8 == 0  # so that the elements are aligned


def test_name_that_is_no_text_in_utf8_is_replaced(tmp_path: Path) -> None:
    reader, [blob] = write_tensors(tmp_path / "run.modtrace", [given_tensor("a\ud800b", "uint8", (1,))])
    assert blob == "tensors-00000.safetensors:000000.a?b"
    assert list(load_arrays(reader.folder / "tensors-00000.safetensors")) == ["000000.a?b"]


@pytest.mark.parametrize(
    ("shape", "order"), [((100_000,), 0), ((100, 1000), 1), ((3, 50_000), 2), ((2, 5, 10_000), 3)]
)
def test_tensor_larger_than_the_ring_goes_through_in_parts(
    tmp_path: Path, shape: tuple[int, ...], order: int
) -> None:
    tensors = [given_tensor("t", "int16", each, order=order, seed=3) for each in ((7,), shape, (9, 2))]
    reader, blobs = write_tensors(tmp_path / "run.modtrace", tensors, TensorOptions(max_bytes=5000))
    assert [bytes(reader.tensor(blob).data) for blob in blobs] == [each.data for each in tensors]
    assert list(load_arrays(reader.folder / "tensors-00000.safetensors")) == [
        "000000.t",
        "000001.t",
        "000002.t",
    ]


def test_bytes_of_a_tensor_are_those_of_the_file_and_cannot_be_written(tmp_path: Path) -> None:
    reader, [blob] = write_tensors(tmp_path / "run.modtrace", [given_tensor("t", "float32", (5,))])
    array = reader.tensor(blob).to_numpy()
    assert not array.flags.owndata
    with pytest.raises(ValueError, match="read-only"):
        array[0] = 1
    assert reader.tensor(blob).data.readonly


def test_tensor_that_is_cut_says_so_and_others_are_read(tmp_path: Path) -> None:
    tensors = [given_tensor("t", "uint8", (1000,), seed=each) for each in range(3)]
    reader, blobs = write_tensors(tmp_path / "run.modtrace", tensors)
    file = reader.folder / "tensors-00000.safetensors"
    os.truncate(file, file.stat().st_size - 1)
    reader = FolderReader(reader.path)
    assert [bytes(reader.tensor(each).data) for each in blobs[:2]] == [each.data for each in tensors[:2]]
    size = file.stat().st_size
    with pytest.raises(
        DamagedRecordingError, match=rf"cut at byte {size}, and '000002.t' ends at byte {size + 1}"
    ):
        reader.tensor(blobs[2])
    assert reader.meta.marks == ("tensors-00000.safetensors is cut: the tensors at its end are missing",)


def test_file_that_is_missing_is_told_of(tmp_path: Path) -> None:
    reader, [blob] = write_tensors(tmp_path / "run.modtrace", [given_tensor("t", "uint8", (3,))])
    (reader.folder / "tensors-00000.safetensors").unlink()
    with pytest.raises(
        RecordingError, match=r"tensors-00000.safetensors: this file of whole tensors is missing"
    ):
        FolderReader(reader.path).tensor(blob)


def test_tensor_is_found_while_the_file_is_written(tmp_path: Path) -> None:
    writer = FolderWriter(tmp_path / "run.modtrace", META)
    reader = FolderReader(writer.folder)
    tensors = [given_tensor("t", "uint8", (100,), seed=each) for each in range(20)]
    for each in tensors:
        blob = each.put(writer)
        assert blob is not None
        writer.wait_for_tensors()
        assert bytes(reader.tensor(blob).data) == each.data
    writer.close()
    assert bytes(reader.tensor(blob).data) == tensors[-1].data
    with pytest.raises(RecordingError, match=r"it does not hold '000020.t': the tensor has not been written"):
        reader.tensor("tensors-00000.safetensors:000020.t")


def test_size_is_that_of_the_files(tmp_path: Path) -> None:
    writer = FolderWriter(tmp_path / "run.modtrace", META, tensors=TensorOptions(shard_bytes=5000))
    for seed in range(5):
        given_tensor("t", "uint8", (2000,), seed=seed).put(writer)
    writer.close()
    assert writer.size_bytes == sum(each.stat().st_size for each in writer.folder.glob("tensors-*"))


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"max_bytes": 4095}, "TensorOptions(max_bytes=4095): give a number of bytes, 4096 or more"),
        ({"max_bytes": 1e9}, "TensorOptions(max_bytes=1000000000.0): give a number of bytes, 4096 or more"),
        ({"shard_bytes": True}, "TensorOptions(shard_bytes=True): give a number of bytes, 4096 or more"),
        ({"when_full": "wait"}, "TensorOptions(when_full='wait'): give 'block' or 'drop'"),
    ],
)
def test_wrong_option_says_what_to_give(options: dict[str, object], text: str) -> None:
    with pytest.raises(ValueError) as raised:
        TensorOptions(**options)  # type: ignore[arg-type]
    assert str(raised.value) == text


def test_reader_that_came_between_a_tensor_and_its_line_finds_it_later(tmp_path: Path) -> None:
    writer = FolderWriter(tmp_path / "run.modtrace", META)
    given = given_tensor("out", "uint8", (100,))
    blob = given.put(writer)
    assert blob is not None
    writer.wait_for_tensors()
    index = index_file(writer.folder / "tensors-00000.safetensors")
    line = index.read_bytes()
    index.write_bytes(b"")
    reader = FolderReader(writer.path)
    with pytest.raises(RecordingError, match=r"it does not hold '000000\.out'"):
        reader.tensor(blob)
    index.write_bytes(line)
    assert bytes(reader.tensor(blob).data) == given.data
    writer.close()
