"""What is in the folder of a Parquet dataset already stays whole, whatever happens to an export."""

import os
from pathlib import Path
from typing import Any

import polars
import pyarrow.parquet as pq
import pytest

from helpers.exported import broken_recording, files_of, part_of, typed_recording
from modtrace.errors import RecordingError, RecordingExistsError
from modtrace.recording.schema import schemas
from modtrace.store import export
from modtrace.store.copy import write_recording
from modtrace.store.parquet import write_parquet

ALL_TABLES = [*schemas(), "runs"]


@pytest.fixture(autouse=True)
def in_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def test_failed_export_leaves_no_folder() -> None:
    with pytest.raises(RecordingError, match="values cannot be read"):
        write_parquet(broken_recording("first"), "exported.parquet")
    assert not os.path.exists("exported.parquet")


def test_failed_export_leaves_a_dataset_as_it_was() -> None:
    write_parquet(typed_recording("first"), "exported.parquet")
    before = {each: Path("exported.parquet", each).read_bytes() for each in files_of("exported.parquet")}
    for run in ("first", "second"):
        with pytest.raises(RecordingError, match="values cannot be read"):
            write_parquet(broken_recording(run), "exported.parquet")
    assert {
        each: Path("exported.parquet", each).read_bytes() for each in files_of("exported.parquet")
    } == before


def test_interrupted_export_leaves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(*_: Any, **__: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(pq.ParquetWriter, "write_table", interrupt)
    with pytest.raises(KeyboardInterrupt):
        write_parquet(typed_recording(), "exported.parquet")
    assert not os.path.exists("exported.parquet")


def test_export_that_ends_between_two_files_has_no_row_in_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    write_parquet(typed_recording("first"), "exported.parquet")
    write_parquet(typed_recording("second"), "exported.parquet")
    places = [part_of(table) for table in ALL_TABLES]
    replaced: list[str] = []
    replace = os.replace

    def replace_two(source: Path, target: Path) -> None:
        if len(replaced) == 2:
            raise OSError(5, "Input/output error")
        replaced.append(target.relative_to("exported.parquet").as_posix())
        replace(source, target)

    monkeypatch.setattr(export.os, "replace", replace_two)
    with pytest.raises(RecordingError, match="cannot write the export here: Input/output error"):
        write_parquet(typed_recording("first"), "exported.parquet")
    assert replaced == sorted(places)[:2]
    assert polars.read_parquet("exported.parquet/runs/**/*.parquet")["run_id"].to_list() == ["second"]
    assert not [each for each in os.listdir("exported.parquet") if each.startswith(".")]


def test_what_a_killed_export_left_is_cleared_by_the_next(tmp_path: Path) -> None:
    left = tmp_path / "exported.parquet" / ".run=first.rank=0.tmp"
    left.mkdir(parents=True)
    (left / "half").write_text("of a file")
    write_parquet(typed_recording(), "exported.parquet")
    assert not left.exists()
    assert len(files_of("exported.parquet")) == len(ALL_TABLES)


def test_folder_of_other_things_is_left_alone(tmp_path: Path) -> None:
    write_recording(typed_recording(), "run.modtrace")
    with pytest.raises(RecordingExistsError) as raised:
        write_parquet(typed_recording(), "run.modtrace")
    assert str(raised.value) == (
        "run.modtrace: a folder that is no export is here already "
        "(it holds 'rank-00000', 'recording.json'). Give another path."
    )
    assert sorted(os.listdir("run.modtrace")) == ["rank-00000", "recording.json"]


def test_files_of_the_user_beside_the_tables_stay(tmp_path: Path) -> None:
    write_parquet(typed_recording("first"), "exported.parquet")
    (tmp_path / "exported.parquet" / "queries.sql").write_text("SELECT 1")
    write_parquet(typed_recording("second"), "exported.parquet")
    assert (tmp_path / "exported.parquet" / "queries.sql").read_text() == "SELECT 1"
