"""The store needs neither torch nor pandas, which pyarrow imports wherever it likes to."""

import subprocess
import sys
from pathlib import Path

RECORD = """
import sys
sys.modules["torch"] = None
import numpy as np
from modtrace.recording.in_memory.recording import MemoryRecording
from modtrace.recording.meta import RunMeta
from modtrace.recording.schema import schemas
from modtrace.store import copy, reader, stream, writer

MODULES = {
    "module_id": [0, 1], "root_id": [0, 0], "path": ["", "head"], "raw_path": ["", "head"], "aliases": [[], ["h"]],
    "name": ["GPT", None], "type": ["GPT", "Linear"], "parent_id": [None, 0], "parameters": [10, None],
    "buffers": [None, None],
}

def write(sink):
    sink.write("modules", MODULES)
    for step in range(70):  # small batches are joined, and files compacted
        ids = np.arange(step * 10, (step + 1) * 10)
        calls = {"call_id": ids, "step": np.full(10, step), "module_id": (ids % 2).astype(np.int32)}
        calls["parent_call_id"] = np.ma.masked_array(ids - 1, ids % 10 == 0)
        calls |= {"end_ns": np.ma.masked_array(ids, np.zeros(10, bool)), "raised": np.zeros(10, bool)}
        sink.write("calls", {**calls, "phase": ids % 4, "start_ns": ids})
        optimizer = {"call_id": [700 + step], "step": [step], "phase": ["optimizer"], "end_ns": [None]}
        sink.write("calls", {**optimizer, "raised": [False], "forward_call_id": [None]})
        sink.write("scalars", {"step": [step], "name": [f"loss/{step % 3}"], "value": [0.5]})
        sink.write("steps", {"step": [step], "kind": ["train"], "start_ns": [step], "end_ns": [step]})
        sink.end_step(step, force=step % 5 == 0)
    sink.close()

memory = MemoryRecording(max_bytes=10_000)
folder = writer.FolderWriter(sys.argv[1], RunMeta())
for sink in memory, folder:
    write(sink)
read = reader.FolderReader(sys.argv[1])
assert memory.meta.marks and read.meta.complete
for data in memory, read:
    print(*(data.table(name).num_rows for name in schemas()))
copy.write_recording(read, sys.argv[1] + ".copy")
print("pandas" in sys.modules)
"""


def test_recording_and_reading_need_no_torch_and_do_not_import_pandas(tmp_path: Path) -> None:
    command = [sys.executable, "-c", RECORD, str(tmp_path / "run.modtrace")]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.stderr == ""
    in_memory, in_folder, has_pandas = done.stdout.splitlines()
    assert in_folder == "2 0 770 0 0 0 0 0 0 0 0 0 0 0 70 70"
    assert in_memory.split()[0::14] == ["2", "70"]  # calls were dropped there
    assert has_pandas == "False"
