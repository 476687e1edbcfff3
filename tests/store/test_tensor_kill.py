"""A process killed, or forked, at any moment leaves the tensors that it had written readable."""

import os
import random
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from helpers.raw_tensors import given_tensor
from modtrace.errors import DamagedRecordingError
from modtrace.recording.meta import RunMeta
from modtrace.recording.options.tensor_options import TensorOptions
from modtrace.store.copy import write_recording
from modtrace.store.read_tensors import TensorFiles
from modtrace.store.reader import FolderReader
from modtrace.store.shard_file import index_file
from modtrace.store.writer import FolderWriter

# Every file holds some tens of tensors, and what was written is said when a row refers to it.
WRITER = """
import os, sys
sys.path.insert(0, sys.argv[2])
from helpers.raw_tensors import given_tensor
from modtrace.recording.meta import RunMeta
from modtrace.recording.options.tensor_options import TensorOptions
from modtrace.store.writer import FolderWriter

options = TensorOptions(max_bytes=100_000, shard_bytes=300_000)
writer = FolderWriter(sys.argv[1], RunMeta(run_id="killed"), tensors=options)
for step in range(100_000):
    blob = given_tensor("t", "uint8", (step * 977 % 20_000,), seed=step).put(writer)
    os.write(1, f"{blob}\\n".encode())
"""


def put_until_killed(path: Path, after: int) -> list[str]:
    """The references that were given out."""
    command = [sys.executable, "-c", WRITER, path, Path(__file__).parent.parent]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as writer:
        assert writer.stdout is not None
        lines = [writer.stdout.readline() for _ in range(after)]
        writer.kill()
        rest = writer.stdout.read()
    assert writer.returncode == -signal.SIGKILL
    return [line for line in ["".join(lines), rest] for line in line.split("\n")[:-1]]


def readable(folder: Path) -> dict[str, bytes]:
    """All tensors that the files of a folder hold, by reference."""
    tensors = TensorFiles(folder)
    tensors.hold()
    return {
        f"{file}:{name}": bytes(tensors.get(f"{file}:{name}").data)
        for file, shard in tensors._shards.items()
        for name in shard.tensors
    }


@pytest.mark.parametrize("seed", range(2))
def test_tensors_written_before_the_kill_are_read(tmp_path: Path, seed: int) -> None:
    given = put_until_killed(tmp_path / "run.modtrace", after=random.Random(seed).randrange(1, 400))
    found = readable(tmp_path / "run.modtrace/rank-00000")
    assert list(found) == given[: len(found)]
    assert len(found) >= len(given) - 200  # 100,000 bytes wait in the ring, 512 at least for each
    for step, data in enumerate(found.values()):
        assert data == given_tensor("t", "uint8", (step * 977 % 20_000,), seed=step).data


@pytest.mark.parametrize("cut", [0, 8, 65_544, 65_545, 67_543, 67_544])
def test_any_prefix_of_an_open_file_is_read(tmp_path: Path, cut: int) -> None:
    writer = FolderWriter(tmp_path / "run.modtrace", RunMeta())
    tensors = [given_tensor("t", "uint8", (1000,), seed=each) for each in range(3)]
    blobs = [each.put(writer) for each in tensors]
    writer.wait_for_tensors()
    os.truncate(writer.folder / "tensors-00000.safetensors", cut)
    reader = FolderReader(writer.folder)
    whole = max(0, (cut - 65_544) // 1000)
    assert [bytes(reader.tensor(each).data) for each in blobs[:whole]] == [
        each.data for each in tensors[:whole]
    ]
    for each in blobs[whole:]:
        with pytest.raises(DamagedRecordingError, match=rf"cut at byte {cut}, and "):
            reader.tensor(each)
    writer.abandon()


def test_any_prefix_of_an_index_is_read(tmp_path: Path) -> None:
    writer = FolderWriter(tmp_path / "run.modtrace", RunMeta())
    tensors = [given_tensor("t", "uint8", (1000,), seed=seed) for seed in range(3)]
    for tensor in tensors:
        tensor.put(writer)
    writer.wait_for_tensors()
    index = index_file(writer.folder / "tensors-00000.safetensors")
    whole = index.read_bytes()
    for length in range(len(whole), -1, -7):
        os.truncate(index, length)
        lines = whole[:length].count(b"\n")
        assert list(readable(writer.folder).values()) == [tensor.data for tensor in tensors[:lines]]
    writer.abandon()


def test_copy_of_a_killed_recording_has_headers(tmp_path: Path) -> None:
    writer = FolderWriter(tmp_path / "run.modtrace", RunMeta())
    tensor = given_tensor("t", "float32", (10,))
    writer.write("values", {"step": [0], "site_id": [0], "order": [0], "blob": [tensor.put(writer)]})
    writer.end_step(0, force=True)
    writer.wait_for_tensors()
    write_recording(FolderReader(writer.path), tmp_path / "copy.modtrace")
    folder = tmp_path / "copy.modtrace/rank-00000"
    assert not index_file(folder / "tensors-00000.safetensors").exists()
    assert list(readable(folder).values()) == [tensor.data]
    writer.abandon()


def test_close_without_a_header_is_marked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> int:
        raise OSError(5, "Input/output error")

    writer = FolderWriter(tmp_path / "run.modtrace", RunMeta())
    tensor = given_tensor("t", "float32", (10,))
    blob = tensor.put(writer)
    monkeypatch.setattr("modtrace.store.shard_file.os.pwrite", fail)
    writer._tensors.close()
    monkeypatch.undo()
    writer.close()
    reader = FolderReader(writer.path)
    assert bytes(reader.tensor(blob).data) == tensor.data
    assert reader.meta.marks == (
        "tensors-00000.safetensors has no header: modtrace can read it, other programs cannot",
    )


FORK = """
import os, sys
sys.path.insert(0, sys.argv[2])
from helpers.raw_tensors import given_tensor
from modtrace.recording.meta import RunMeta
from modtrace.store.writer import FolderWriter

writer = FolderWriter(sys.argv[1], RunMeta(run_id="forked"))
for step in range(50):
    given_tensor("t", "uint8", (20_000,), seed=step).put(writer)
for end in ("", "writer.close()", "writer.abandon()", "del writer", "os._exit(0)"):
    child = os.fork()
    if not child:
        assert given_tensor("child", "uint8", (20_000,)).put(writer) is None
        exec(end)
        sys.exit(0)
    assert os.waitpid(child, 0)[1] == 0, end
given_tensor("t", "uint8", (20_000,), seed=50).put(writer)
writer.close()
"""


def test_tensors_are_the_parents(tmp_path: Path) -> None:
    path = tmp_path / "run.modtrace"
    subprocess.run([sys.executable, "-c", FORK, path, Path(__file__).parent.parent], check=True)
    expected = [given_tensor("t", "uint8", (20_000,), seed=each).data for each in range(51)]
    assert list(readable(path / "rank-00000").values()) == expected
    assert FolderReader(path).meta.marks == ()


def test_ring_does_not_hold_more_than_it_may(tmp_path: Path) -> None:
    writer = FolderWriter(tmp_path / "run.modtrace", RunMeta(), tensors=TensorOptions(max_bytes=10_000))
    for step in range(300):
        given_tensor("t", "uint8", (step * 37 % 5000,), seed=step).put(writer)
        parts = list(writer._tensors._ring._parts)
        assert sum(each.size_bytes for each in parts) <= 10_000
        assert len(parts) <= 20
    assert writer._tensors._ring._memory is not None
    assert writer._tensors._ring._memory.nbytes <= 10_000
    writer.close()
    assert writer._tensors._ring._memory is None
