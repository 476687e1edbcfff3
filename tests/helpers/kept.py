"""What a sink holds after it was written to: in memory, in a folder, and copied into one."""

from collections.abc import Callable
from pathlib import Path

from modtrace.recording.in_memory.recording import MemoryRecording
from modtrace.recording.meta import RunMeta
from modtrace.recording.options.tensor_options import TensorOptions
from modtrace.recording.protocols import RecordingData, Sink
from modtrace.store.copy import write_recording
from modtrace.store.reader import FolderReader
from modtrace.store.writer import FolderWriter

META = RunMeta(run_id="r1", created="2026-11-20T10:00:00Z", argv=("train.py", "--lr", "1"), world_size=1)

#: Makes a sink, lets it be written to, and gives back what it holds.
Keep = Callable[[Path, Callable[[Sink], None]], RecordingData]


def keep_in_memory(folder: Path, write: Callable[[Sink], None]) -> RecordingData:
    recording = MemoryRecording(META)
    write(recording)
    recording.close()
    return recording


def keep_in_folder(
    folder: Path, write: Callable[[Sink], None], tensors: TensorOptions | None = None
) -> RecordingData:
    writer = FolderWriter(folder / "run.modtrace", META, tensors=tensors)
    write(writer)
    writer.close()
    return FolderReader(folder / "run.modtrace")


def keep_in_copied_memory(folder: Path, write: Callable[[Sink], None]) -> RecordingData:
    write_recording(keep_in_memory(folder, write), folder / "copy.modtrace")
    return FolderReader(folder / "copy.modtrace")
