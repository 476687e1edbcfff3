"""Many small steps take little more than their columns do."""

from pathlib import Path

import numpy as np

from helpers.typed_rows import MS
from modtrace.recording.meta import RunMeta
from modtrace.store.reader import FolderReader
from modtrace.store.writer import FolderWriter

STEPS, CALLS = 1_000, 200


def test_files_of_small_steps_are_within_twice_their_columns(tmp_path: Path) -> None:
    writer = FolderWriter(tmp_path / "run.modtrace", RunMeta())
    for step in range(STEPS):
        ids = np.arange(step * CALLS, (step + 1) * CALLS)
        writer.write("calls", {"call_id": ids, "step": np.full(CALLS, step), "phase": ids % 4})
        writer.write("steps", {"step": [step], "kind": ["train"]})
        writer.end_step(step * 200 * MS)  # so that each is written by itself
    assert size_ratio(tmp_path / "run.modtrace") < 2
    writer.close()
    assert size_ratio(tmp_path / "run.modtrace") < 1.01


def size_ratio(path: Path) -> float:
    """What the calls take on disk, in sizes of their columns."""
    calls = FolderReader(path).table("calls")
    assert calls.num_rows == STEPS * CALLS
    return (path / "rank-00000/calls.arrow").stat().st_size / calls.combine_chunks().nbytes
