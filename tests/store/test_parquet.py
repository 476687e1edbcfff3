"""The Parquet dataset: DuckDB, Polars and pandas read it, and what is in the folder already stays whole."""

import os
import re
from pathlib import Path
from typing import Any

import duckdb
import pandas
import polars
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from torch import nn

import modtrace
from helpers.exported import files_of, part_of, typed_recording
from modtrace.recording.meta import RunMeta
from modtrace.recording.protocols import RecordingData
from modtrace.recording.schema import schemas
from modtrace.store.export import export_names
from modtrace.store.parquet import write_parquet
from modtrace.store.reader import FolderReader, RankOfRun, open_ranks
from modtrace.store.writer import FolderWriter

PAGE = (Path(__file__).parents[2] / "docs" / "export.md").read_text(encoding="utf-8")
MS = 1_000_000
ALL_TABLES = [*schemas(), "runs"]


@pytest.fixture(autouse=True)
def in_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)  # the queries of the page name `exported.parquet`


def ask_duckdb() -> list[tuple[Any, ...]]:
    [query] = re.findall(r"```sql\n(.*?)```", PAGE, re.DOTALL)
    return duckdb.connect().execute(query).fetchall()


def ask_polars() -> list[tuple[Any, ...]]:
    [script] = [each for each in re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL) if "polars" in each]
    names: dict[str, Any] = {}
    exec(script, names)
    return names["slowest"].select("run", "rank", "step", "module", "own_ms").rows()


BOTH = pytest.mark.parametrize("ask", [ask_duckdb, ask_polars])


@BOTH
def test_slowest_module_per_step_of_a_typed_recording(ask: Any) -> None:
    write_parquet(typed_recording(), "exported.parquet")
    assert ask() == [("first", 0, 0, "head", 3.0), ("first", 0, 1, "body", 4.0)]


@BOTH
def test_slowest_module_per_step_of_a_real_training(ask: Any, seeded: None) -> None:
    model = nn.Sequential(nn.Linear(8, 64), nn.Sequential(nn.ReLU(), nn.Linear(64, 1)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with modtrace.record(model, to="run.modtrace", ops=True) as rec:
        for _ in range(3):
            model(torch.ones(4, 8)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            rec.step()
    data = FolderReader("run.modtrace")
    write_parquet(data, "exported.parquet")
    assert [(*row[:-1], round(row[-1], 6)) for row in ask()] == slowest_by_hand(data)
    assert [row[2] for row in ask()] == [0, 1, 2]


def slowest_by_hand(data: RecordingData) -> list[tuple[Any, ...]]:
    names = {row["module_id"]: row["name"] or row["path"] for row in data.table("modules").to_pylist()}
    calls = {row["call_id"]: row for row in data.table("calls").to_pylist() if row["module_id"] is not None}
    own: dict[tuple[int, int], int] = {}
    for row in calls.values():
        ns = row["end_ns"] - row["start_ns"] - (row["overhead_ns"] or 0)
        parent = calls.get(row["parent_call_id"])
        for each, sign in ((row, 1), (parent, -1)):
            if each is not None:
                place = each["step"], each["module_id"]
                own[place] = own.get(place, 0) + sign * ns
    slowest = {step: max((ns, id) for (of, id), ns in own.items() if of == step) for step, _ in own}
    run = data.meta.run_id
    return [(run, 0, step, names[id], ns / 1e6) for step, (ns, id) in sorted(slowest.items())]


@BOTH
def test_two_runs_and_two_ranks_in_one_folder_are_queried_together(ask: Any) -> None:
    for data in (
        typed_recording("first"),
        typed_recording("second", rank=0, head_ms=4),
        typed_recording("second", rank=1, head_ms=5),
    ):
        write_parquet(data, "exported.parquet")
    assert ask() == [
        ("first", 0, 0, "head", 3.0),
        ("first", 0, 1, "body", 4.0),
        ("second", 0, 0, "head", 4.0),
        ("second", 0, 1, "body", 4.0),
        ("second", 1, 0, "head", 5.0),
        ("second", 1, 1, "body", 4.0),
    ]


@BOTH
def test_second_export_of_a_run_replaces_that_run_alone(ask: Any) -> None:
    for data in (typed_recording("first"), typed_recording("second"), typed_recording("first", head_ms=5)):
        write_parquet(data, "exported.parquet")
    assert [row[-1] for row in ask()] == [5.0, 4.0, 3.0, 4.0]
    assert files_of("exported.parquet") == sorted(
        part_of(table, run) for table in ALL_TABLES for run in ("first", "second")
    )


@BOTH
def test_run_ids_with_any_characters_come_back(ask: Any) -> None:
    for run in ("my run/1=ä%20", "007"):
        write_parquet(typed_recording(run), "exported.parquet")
    assert {row[0] for row in ask()} == {"my run/1=ä%20", "007"}


def test_every_table_is_there_and_words_are_strings_to_all_readers() -> None:
    write_parquet(typed_recording(), "exported.parquet")
    assert sorted(os.listdir("exported.parquet")) == sorted(export_names()) == sorted(ALL_TABLES)

    values = "exported.parquet/values/**/*.parquet"
    expected = {"phase": "forward", "dtype": "float32", "shape": [2], "count": 2, "nan_count": 1}
    names = list(expected)
    [by_duckdb] = duckdb.connect().execute(f"SELECT {', '.join(names)} FROM '{values}'").fetchall()
    assert dict(zip(names, by_duckdb, strict=True)) == expected
    by_polars = polars.read_parquet(values, hive_partitioning=True)
    assert by_polars.select(names).to_dicts() == [expected]
    assert (by_polars.schema["phase"], by_polars.schema["run"]) == (polars.String, polars.String)
    [by_pandas] = pandas.read_parquet("exported.parquet/values")[names].to_dict("records")
    assert by_pandas | {"shape": list(by_pandas["shape"])} == expected


def test_rows_are_those_of_the_recording() -> None:
    data = typed_recording()
    write_parquet(data, "exported.parquet")
    for name in set(schemas()) - {"modules"}:
        read = pq.ParquetFile(f"exported.parquet/{part_of(name)}").read()
        assert read.schema.names == data.table(name).schema.names
        assert repr(read.to_pylist()) == repr(data.table(name).to_pylist())


def test_module_whose_name_was_learnt_late_is_there_once() -> None:
    write_parquet(typed_recording(), "exported.parquet")
    modules = polars.read_parquet("exported.parquet/modules/**/*.parquet")
    assert modules.select("module_id", "name", "path").rows() == [
        (0, "Net", ""),
        (1, None, "body"),
        (2, None, "head"),
    ]


def test_table_of_runs_says_what_was_run() -> None:
    write_parquet(typed_recording(), "exported.parquet")
    [row] = polars.read_parquet("exported.parquet/runs/**/*.parquet", hive_partitioning=True).to_dicts()
    assert row == {
        "run_id": "first",
        "created": "",
        "modtrace_version": "",
        "argv": ["train.py", "--lr=1"],
        "versions": '{"torch": "2.13.0"}',
        "device": "",
        "git_commit": None,
        "options": "{}",
        "world_size": 1,
        "clock_time_ns": 0,
        "clock_perf_counter_ns": 0,
        "marks": [],
        "complete": True,
        "flags": None,
        "run": "first",
        "rank": 0,
    }


def test_run_without_an_id_is_unnamed() -> None:
    write_parquet(typed_recording(run_id=""), "exported.parquet")
    assert os.listdir("exported.parquet/calls") == ["run=unnamed"]


def test_all_ranks_and_restarts_of_a_recording_are_found() -> None:
    for rank, again in ((0, False), (1, False), (0, True)):
        meta = RunMeta(run_id="r1", rank=rank, world_size=2)
        FolderWriter("run.modtrace", meta, new_attempt=again).close()
    assert [each.name for each in open_ranks(FolderReader("run.modtrace"))] == [
        RankOfRun(run="r1", rank=0),
        RankOfRun(run="r1.attempt-1", rank=0),
        RankOfRun(run="r1", rank=1),
    ]
    [only] = open_ranks(FolderReader("run.modtrace/rank-00001"))
    assert only.name == RankOfRun(run="r1", rank=1)


def test_many_rows_are_written_in_groups_that_readers_skip_by_step(monkeypatch: pytest.MonkeyPatch) -> None:
    from modtrace.store import export

    monkeypatch.setattr(export, "_MOST_ROWS", 3)
    write_parquet(typed_recording(), "exported.parquet")
    file = pq.ParquetFile(f"exported.parquet/{part_of('calls')}").metadata
    step = file.schema.names.index("step")
    found = [file.row_group(at).column(step).statistics for at in range(file.num_row_groups)]
    assert [(each.min, each.max) for each in found] == [(0, 0), (0, 1), (1, 1)]


def test_rows_with_long_lists_are_written_in_smaller_pieces() -> None:
    from modtrace.store.export import slices

    lists = pa.array([[0] * 4096] * 4096, pa.list_(pa.int64()))  # 128 MiB
    pieces = list(slices(pa.table({"shape": lists})))
    assert [piece.num_rows for piece in pieces] == [2047, 2047, 2]
