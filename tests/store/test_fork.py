"""A forked child, however it ends and whatever it calls, does not touch its parent's recording."""

import subprocess
import sys
from pathlib import Path

from helpers.typed_rows import expected, rows
from modtrace.store.reader import FolderReader

# The parent has one step on disk and one in memory when it forks.
PARENT = """
import os, sys
sys.path.insert(0, sys.argv[2])
from helpers.typed_rows import write_step
from modtrace.recording.meta import RunMeta
from modtrace.store.writer import FolderWriter

writer = FolderWriter(sys.argv[1], RunMeta(run_id="forked"))
write_step(writer, 0, 0)
write_step(writer, 1, 1)
folder = os.path.join(sys.argv[1], "rank-00000")

def state():
    return {name: open(os.path.join(folder, name), "rb").read() for name in os.listdir(folder)}

before = state()
for end in sys.argv[3:]:
    child = os.fork()
    if not child:
        exec(end)
        sys.exit(0)  # an exit with all destructors
    assert os.waitpid(child, 0)[1] == 0, end
    assert state() == before, end
write_step(writer, 2, 2, force=True)
writer.close()
"""

#: What its children do, one after the other.
CHILDREN = (
    "",
    "os._exit(0)",
    "writer.abandon(); writer.abandon()",
    "writer.abandon(); write_step(writer, 7, 0, force=True); writer.close()",
    "write_step(writer, 7, 0, force=True); writer.mark('from the child'); writer.close()",
    "writer.close()",
    "del writer; import gc; gc.collect()",
)


def test_recording_is_the_parents(tmp_path: Path) -> None:
    path = tmp_path / "run.modtrace"
    tests = Path(__file__).parent.parent
    subprocess.run([sys.executable, "-c", PARENT, path, tests, *CHILDREN], check=True)
    reader = FolderReader(path)
    assert rows(reader) == expected(3)
    assert reader.meta.complete is True
