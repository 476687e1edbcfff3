"""A snapshot of a recording that grows while it is read."""

from pathlib import Path

import pyarrow as pa
import pytest

from helpers.growing_run import GrowingRun
from helpers.report_tables import column, report
from modtrace.recording.schema import schemas
from modtrace.store.reader import FolderReader
from modtrace.store.snapshot import Snapshot


def open_growing(run: GrowingRun, to: Path, monkeypatch: pytest.MonkeyPatch) -> FolderReader:
    """A reader behind whose back a step is written before each table is read, as long as there are more."""
    read = FolderReader._read

    def grow_and_read(self: FolderReader, name: str) -> pa.Table:
        run.go_on()
        return read(self, name)

    reader = FolderReader(to)
    monkeypatch.setattr(FolderReader, "_read", grow_and_read)
    return reader


def test_rows_of_each_step_are_there_with_all_that_they_refer_to(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = GrowingRun(tmp_path / "run.modtrace", steps=40)
    snapshot = Snapshot(open_growing(run, tmp_path / "run.modtrace", monkeypatch))
    steps, calls = (snapshot.table(name)["step"].to_pylist() for name in ("steps", "calls"))
    assert 0 < len(steps) < len(calls)
    assert set(steps) <= set(calls) <= set(range(40))
    assert {*snapshot.table("values")["call_id"].to_pylist()} <= {
        *snapshot.table("calls")["call_id"].to_pylist()
    }
    before = {name: snapshot.table(name).num_rows for name in schemas()}
    made = report(snapshot)
    assert column(made.tables["steps"], "number") == [float(step) for step in sorted({*steps, *calls})]
    assert {name: snapshot.table(name).num_rows for name in schemas()} == before
    with pytest.raises(ValueError, match="nothing"):
        snapshot.table("nothing")
    run.close()
