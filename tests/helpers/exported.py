"""A small recording typed by hand, for the tests of exports, and one that breaks while it is read."""

from pathlib import Path

import pyarrow as pa

from builders import RecordingBuilder, TypedRecording
from modtrace.errors import RecordingError
from modtrace.recording.schema import schemas

MS = 1_000_000


def typed_recording(run_id: str = "first", rank: int = 0, head_ms: int = 3) -> TypedRecording:
    """Two steps; in the first the head is the slowest, in the second the body, which runs twice."""
    build = RecordingBuilder(
        run_id=run_id, rank=rank, argv=("train.py", "--lr=1"), versions={"torch": "2.13.0"}, complete=True
    )
    net = build.module("", "Net", name="?")
    body, head = build.module("body", "Linear", parent=net), build.module("head", "Linear", parent=net)
    build.module("", "Net", name="Net", module_id=net)
    build.step(0, 0, 10 * MS)
    outer = build.call(net, 0, 8 * MS, overhead_ns=2 * MS)
    build.call(body, 0, 2 * MS, parent=outer)
    build.call(head, 2 * MS, (2 + head_ms) * MS, parent=outer)
    build.optimizer(8 * MS, 20 * MS)
    build.step(1, 10 * MS, 20 * MS)
    outer = build.call(net, 10 * MS, 16 * MS)
    build.call(body, 10 * MS, 12 * MS, parent=outer, nth=0)
    build.call(body, 12 * MS, 14 * MS, parent=outer, nth=1)
    build.output(build.call(head, 14 * MS, 15 * MS, parent=outer), [0.5, float("nan")])
    return build.data()


class Breaking(TypedRecording):
    """A recording of which a table cannot be read, as when its disk is gone."""

    def table(self, name: str) -> pa.Table:
        if name == "values":
            raise RecordingError("values cannot be read")
        return super().table(name)


def broken_recording(run_id: str) -> Breaking:
    good = typed_recording(run_id)
    return Breaking(good._rows, good.meta)


def part_of(table: str, run: str = "first", rank: int = 0) -> str:
    """The file of a rank whose steps are all of the first block, in a Parquet dataset."""
    block = "block=0/" if table in schemas() and "step" in schemas()[table].names else ""
    return f"{table}/run={run}/rank={rank}/{block}part-0.parquet"


def files_of(folder: str) -> list[str]:
    return sorted(each.relative_to(folder).as_posix() for each in Path(folder).rglob("*") if each.is_file())
