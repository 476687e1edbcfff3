"""Every sink gives back the whole tensors that it was given: in memory, in a folder, and copied."""

import threading
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from helpers.kept import META, Keep, keep_in_copied_memory, keep_in_folder, keep_in_memory
from helpers.raw_tensors import Given, given_tensor, given_tensors
from modtrace.errors import MisuseError, RecordingError
from modtrace.recording.in_memory.recording import MemoryRecording
from modtrace.recording.options.tensor_options import TensorOptions
from modtrace.recording.protocols import RecordingData, Sink
from modtrace.store.copy import write_recording
from modtrace.store.reader import FolderReader
from modtrace.store.writer import FolderWriter

SMALL = TensorOptions(max_bytes=4096, shard_bytes=4096)


def keep_in_small_shards(folder: Path, write: Callable[[Sink], None]) -> RecordingData:
    return keep_in_folder(folder, write, tensors=SMALL)


def keep_in_unclosed_folder(folder: Path, write: Callable[[Sink], None]) -> RecordingData:
    writer = FolderWriter(folder / "run.modtrace", META)
    write(writer)
    writer.end_step(0, force=True)
    writer.wait_for_tensors()
    return FolderReader(folder / "run.modtrace")


def keep_in_copied_folder(folder: Path, write: Callable[[Sink], None]) -> RecordingData:
    """A copy over itself: the files that it is made of are deleted first."""
    data = keep_in_folder(folder, write)
    write_recording(data, folder / "run.modtrace", overwrite=True)
    return FolderReader(folder / "run.modtrace")


KEPT = [keep_in_memory, keep_in_folder, keep_in_small_shards, keep_in_unclosed_folder]
every_sink = pytest.mark.parametrize("keep", [*KEPT, keep_in_copied_memory, keep_in_copied_folder])


def write_rows(sink: Sink, tensors: list[Given]) -> None:
    """One row of `values` for each tensor, in steps of three."""
    for at, each in enumerate(tensors):
        blob = each.put(sink, step=at // 3)
        sink.write("values", {"step": [at // 3], "site_id": [at], "order": [at], "blob": [blob]})


def blobs(data: RecordingData) -> list[str]:
    return data.table("values")["blob"].to_pylist()


@every_sink
@settings(max_examples=8, deadline=None)
@given(tensors=st.lists(given_tensors(), max_size=12))
def test_what_is_put_is_read_bit_by_bit(keep: Keep, tensors: list[Given]) -> None:
    with TemporaryDirectory() as folder:
        data = keep(Path(folder), lambda sink: write_rows(sink, tensors))
        found = [data.tensor(blob) for blob in blobs(data)]
        assert [(each.dtype, each.shape) for each in found] == [(each.dtype, each.shape) for each in tensors]
        assert [bytes(each.data) for each in found] == [each.data for each in tensors]
        assert len(set(blobs(data))) == len(tensors)


@every_sink
def test_tensor_is_copied_before_put_returns(tmp_path: Path, keep: Keep) -> None:
    array = np.arange(1000, dtype=np.float32)

    def write(sink: Sink) -> None:
        for step in range(3):
            blob = sink.put_tensor("blocks.0.attn.output", array, "float32", (1000,), step=step)
            sink.write("values", {"step": [step], "site_id": [0], "order": [0], "blob": [blob]})
            array[:] = -1

    data = keep(tmp_path, write)
    assert data.tensor(blobs(data)[0]).to_numpy().tolist() == list(range(1000))
    assert data.tensor(blobs(data)[2]).to_numpy().tolist() == [-1] * 1000


@every_sink
def test_rows_of_one_tensor_share_its_reference(tmp_path: Path, keep: Keep) -> None:
    tensor = given_tensor("out", "float32", (3,))

    def write(sink: Sink) -> None:
        blob = tensor.put(sink)
        sink.write("values", {"step": [0, 0], "site_id": [0, 1], "order": [0, 0], "blob": [blob, blob]})
        sink.write("values", {"step": [0], "site_id": [2], "order": [1]})

    data = keep(tmp_path, write)
    one, other, none = blobs(data)
    assert one == other
    assert none is None
    assert bytes(data.tensor(one).data) == tensor.data


@every_sink
def test_any_thread_may_put(tmp_path: Path, keep: Keep) -> None:
    given = [given_tensor(f"t{at}", "int32", (at % 50, 9), seed=at) for at in range(200)]
    put: dict[str, Given] = {}

    def write(sink: Sink) -> None:
        def put_some(first: int) -> None:
            for each in given[first::4]:
                blob = each.put(sink, step=0)
                assert blob is not None
                put[blob] = each

        threads = [threading.Thread(target=put_some, args=(each,)) for each in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        sink.write(
            "values", {"step": [0] * 200, "site_id": range(200), "order": range(200), "blob": list(put)}
        )

    data = keep(tmp_path, write)
    assert [bytes(data.tensor(each).data) for each in blobs(data)] == [each.data for each in put.values()]


@pytest.mark.parametrize("make", [MemoryRecording, lambda: FolderWriter("run.modtrace", META)])
def test_tensor_that_does_not_fit_its_shape_is_refused(
    make: Callable[[], Sink], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    sink = make()
    with pytest.raises(ValueError, match=r"^out: 12 bytes are no tensor of float64 and shape \(3,\)"):
        sink.put_tensor("out", np.zeros(3, np.float32), "float64", (3,))
    sink.close()
    with pytest.raises(MisuseError, match=r"the tensor 'out' comes after the recording was closed$"):
        sink.put_tensor("out", np.zeros(3, np.float32), "float32", (3,))


def test_oldest_tensors_in_memory_are_dropped() -> None:
    recording = MemoryRecording(tensors=TensorOptions(max_bytes=8192))
    put = [
        recording.put_tensor("out", np.full(1024, step, np.uint8), "uint8", (1024,), step=step)
        for step in range(20)
    ]
    assert recording.put_tensor("large", np.zeros(8193, np.uint8), "uint8", (8193,), step=3) is None
    assert [recording.tensor(each).to_numpy()[0] for each in put[12:]] == list(range(12, 20))
    assert recording.size_bytes == 8192
    mark = "whole tensors of steps before 12 were dropped to stay within max_bytes=8192"
    assert recording.meta.marks == (mark,)
    with pytest.raises(RecordingError, match=f"^memory:000011.out: this tensor is not here: {mark}.$"):
        recording.tensor(put[11])


def test_copy_says_which_tensors_are_missing(tmp_path: Path) -> None:
    recording = MemoryRecording(META, tensors=TensorOptions(max_bytes=4096))
    write_rows(recording, [given_tensor("out", "float32", (700,), seed=each) for each in range(3)])
    recording.close()
    write_recording(recording, tmp_path / "copy.modtrace")
    data = FolderReader(tmp_path / "copy.modtrace")
    assert blobs(data) == [None, None, "tensors-00000.safetensors:000000.out"]
    assert data.meta.marks[0] == "whole tensors of steps before 1 were dropped to stay within max_bytes=4096"
    assert data.meta.marks[1].startswith("2 whole tensors could not be copied: memory:000000.out: ")
