"""A forked child, however it ends and whatever it calls, does not touch its parent's recording."""

import subprocess
import sys
from pathlib import Path

import pytest

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
    return {{name: open(os.path.join(folder, name), "rb").read() for name in os.listdir(folder)}}

before = state()
child = os.fork()
if not child:
{child}
    sys.exit(0)  # an exit with all destructors
assert os.waitpid(child, 0)[1] == 0
assert state() == before
write_step(writer, 2, 2, force=True)
writer.close()
"""

CHILDREN = {
    "exits": "",
    "exits at once": "os._exit(0)",
    "abandons": "writer.abandon(); writer.abandon()",
    "abandons and goes on": "writer.abandon(); write_step(writer, 7, 0, force=True); writer.close()",
    "goes on": "write_step(writer, 7, 0, force=True); writer.mark('from the child'); writer.close()",
    "closes": "writer.close()",
    "deletes": "del writer; import gc; gc.collect()",
}


@pytest.mark.parametrize("child", CHILDREN)
def test_recording_is_the_parents(tmp_path: Path, child: str) -> None:
    script = PARENT.format(child="    " + CHILDREN[child])
    path = tmp_path / "run.modtrace"
    subprocess.run([sys.executable, "-c", script, path, Path(__file__).parent.parent], check=True)
    reader = FolderReader(path)
    assert rows(reader) == expected(3)
    assert reader.meta.complete is True
