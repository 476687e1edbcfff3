"""What `open_dataset` refuses, and what it does with datasets that are not whole."""

import json
import os
import shutil
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

import modtrace
from helpers.command_line import run_command
from helpers.exported import typed_recording
from helpers.planted_dataset import PlantedRun
from modtrace.errors import DamagedRecordingError, MissingLibraryError, RecordingError, RecordingNotFoundError
from modtrace.store.parquet import write_parquet


@pytest.fixture
def path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.chdir(tmp_path)
    for rank in (0, 1):
        write_parquet(typed_recording("first", rank=rank), "runs.parquet")
    return "runs.parquet"


def test_what_is_no_dataset_is_told_from_one(path: str) -> None:
    with pytest.raises(
        RecordingNotFoundError, match=r"nowhere: nothing is here\. Write a dataset with: modtrace export"
    ):
        modtrace.open_dataset("nowhere")
    os.mkdir("empty")
    with pytest.raises(RecordingError, match="empty: no dataset is here"):
        modtrace.open_dataset("empty")
    Path("empty/recording.json").write_text("{}")
    with pytest.raises(RecordingError, match="empty: this is a recording, and no dataset"):
        modtrace.open_dataset("empty")


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"engine": "duckdbb"}, "engine='duckdbb': there are duckdb and spark. Did you mean 'duckdb'?"),
        ({"run": "frist"}, "run='frist': the dataset has first. Did you mean 'first'?"),
        ({"steps": "9"}, "steps='9' is not START:STOP"),
        ({"memory_limit": "much"}, "memory_limit='much': "),
    ],
)
def test_wrong_options_are_named(path: str, options: dict[str, Any], text: str) -> None:
    with pytest.raises(ValueError, match=text.replace("?", r"\?")):
        modtrace.open_dataset(path, **options)


def test_wrong_questions_and_texts_are_named(path: str) -> None:
    with modtrace.open_dataset(path) as dataset:
        with pytest.raises(
            ValueError, match=r"no question 'nonfinit': there are .* Did you mean 'nonfinite'"
        ):
            dataset.ask("nonfinit")
        with pytest.raises(ValueError, match=r"DuckDB cannot run this: .*stepp"):
            dataset.sql("SELECT stepp FROM stats")
        with pytest.raises(ValueError, match="DuckDB cannot run this"):
            dataset.sql("SELEC")
        assert dataset.sql("SELECT 1 AS one; ").to_pylist() == [{"one": 1}]


def test_rank_whose_export_was_cut_off_is_left_out_and_named(path: str) -> None:
    shutil.rmtree("runs.parquet/runs/run=first/rank=1")
    with modtrace.open_dataset(path) as dataset:
        assert dataset.notes == [
            "rank 1 of run first is left out: its export was cut off. Export the run again."
        ]
        for view in ("calls", "steps", "stats", "sites", "modules"):
            assert dataset.sql(f"SELECT DISTINCT rank FROM {view}")["rank"].to_pylist() in ([0], [])


def test_column_that_an_older_export_lacks_is_null(path: str) -> None:
    for rank in (0, 1):
        file = f"runs.parquet/values/run=first/rank={rank}/block=0/part-0.parquet"
        pq.write_table(pq.ParquetFile(file).read().drop_columns(["hash", "global_shape"]), file)
        if rank == 0:
            with modtrace.open_dataset(path) as dataset:  # the other rank has them still
                assert set(dataset.sql("SELECT hash FROM stats")["hash"].to_pylist()) == {None}
    with modtrace.open_dataset(path) as dataset:
        assert set(dataset.sql("SELECT hash FROM stats")["hash"].to_pylist()) == {None}


def test_dataset_of_the_layout_without_blocks_is_refused_by_name(path: str) -> None:
    shutil.move(
        "runs.parquet/calls/run=first/rank=0/block=0/part-0.parquet", "runs.parquet/calls/run=first/rank=0/"
    )
    with pytest.raises(
        DamagedRecordingError, match=r"part-0\.parquet: an older modtrace wrote this\. Export its run again"
    ):
        modtrace.open_dataset(path)


def test_file_that_is_no_parquet_is_named(path: str) -> None:
    Path("runs.parquet/values/run=first/rank=0/block=0/part-0.parquet").write_bytes(
        b"PAR1 and no more, but long enough"
    )
    with (
        pytest.raises(DamagedRecordingError, match=r"part-0\.parquet"),
        modtrace.open_dataset(path) as dataset,
    ):
        dataset.ask("nonfinite")


def test_names_of_folders_and_runs_are_taken_as_they_are(tmp_path: Path) -> None:
    path = tmp_path / "it's [1]*.parquet"
    for run in ("it's", "a/b=1%20", "007"):
        write_parquet(typed_recording(run), path)
    with modtrace.open_dataset(path) as dataset:
        assert sorted(dataset.sql("SELECT run FROM runs")["run"].to_pylist()) == ["007", "a/b=1%20", "it's"]
    with modtrace.open_dataset(path, run="it's") as dataset:
        assert dataset.sql("SELECT DISTINCT run FROM calls")["run"].to_pylist() == ["it's"]


def test_rows_lie_in_blocks_of_steps_and_an_export_that_has_fewer_takes_the_others_away(
    tmp_path: Path,
) -> None:
    path = tmp_path / "runs.parquet"
    PlantedRun(steps=2100).write(path)
    blocks = sorted(file.parent.name for file in path.glob("steps/run=planted/rank=0/*/*.parquet"))
    assert blocks == ["block=0", "block=1", "block=2"]
    with modtrace.open_dataset(path, steps="999:1001") as dataset:
        assert dataset.sql("SELECT count(*) AS n FROM steps").to_pylist() == [{"n": 8}]
    PlantedRun(steps=40).write(path)
    assert [file.name for file in path.glob("steps/run=planted/rank=0/*")] == ["block=0"]
    with modtrace.open_dataset(path) as dataset:
        assert dataset.sql("SELECT max(step) AS step FROM stats").to_pylist() == [{"step": 39}]


def test_engine_that_is_not_installed_says_how_to_get_it(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "duckdb", None)
    with pytest.raises(
        MissingLibraryError, match=r"needs duckdb, which is not installed here.*modtrace\[query\]"
    ):
        modtrace.open_dataset(path)


def test_nothing_is_left_in_the_folder_of_the_program(path: str) -> None:
    with modtrace.open_dataset(path, memory_limit="100MB") as dataset:
        dataset.ask("slowest-modules")
    assert os.listdir() == ["runs.parquet"]


def test_command_answers_lists_and_refuses(
    path: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def ask(*arguments: str) -> tuple[int, str, str]:
        code = run_command(monkeypatch, "query", *arguments)
        return (code, *capsys.readouterr())

    assert ask()[1].startswith("modtrace query DATASET QUESTION answers:\n\ngradients: How large")
    assert ask(path)[1] == ask()[1]
    assert ask("nonfinite", "--show-sql")[1].startswith("-- Which NaN and which infinity came up first")
    for given in ((), (path,)):
        code, _, refused = ask(*given, "--show-sql")
        assert code == 2 and "name the question that --show-sql prints: gradients, " in refused
    assert "no question 'nonfinit'" in ask("nonfinit", "--show-sql")[2]
    code, out, _ = ask(path, "nonfinite")
    assert code == 0 and out.splitlines()[0].split() == ["run", "first"]
    assert json.loads(ask(path, "nonfinite", "--json")[1])["rows"][0]["step"] == 1
    assert ask(path, "missing-steps")[1:] == ("nothing found: the answer has no rows\n", "")
    Path("mine.sql").write_text("SELECT rank, step FROM steps ORDER BY ALL")
    assert ask(path, "--sql", "@mine.sql", "--top", "1")[1] == (
        "rank  0\nstep  0\n\nand 3 rows more: --top 4, or --json\n"
    )
    for arguments, said in (
        ((path, "nonfinite", "--sql", "SELECT 1"), "give the question 'nonfinite' or --sql, not both"),
        ((path, "nope"), "no question 'nope'"),
        ((path, "--sql", "SELEC"), "DuckDB cannot run this"),
        ((path, "--sql", "@nowhere.sql"), "--sql: nowhere.sql: cannot be read"),
        ((path, "nonfinite", "--run", "x"), "--run: run='x'"),
        ((path, "nonfinite", "--memory-limit", "x"), "--memory-limit: memory_limit='x'"),
        (("nowhere", "nonfinite"), "nowhere: nothing is here"),
    ):
        code, _, err = ask(*arguments)
        assert (code, said in err) == (2, True), err


def test_damaged_file_stops_only_those_who_ask_for_it(path: str) -> None:
    Path("runs.parquet/values/run=first/rank=0/block=0/part-0.parquet").write_bytes(
        b"PAR1 and no more than this"
    )
    shutil.rmtree("runs.parquet/scalars")
    with modtrace.open_dataset(path) as dataset:
        assert dataset.ask("slowest-modules").num_rows == 3
        for question in ("nonfinite", "scalars"):
            with pytest.raises(RecordingError):
                dataset.ask(question)


def test_rank_of_which_the_first_tables_alone_were_replaced_is_left_out(path: str) -> None:
    """Tables are moved in the order of their names, and `runs` comes last."""
    shutil.rmtree("runs.parquet/runs/run=first/rank=1")
    shutil.rmtree("runs.parquet/steps/run=first/rank=1")
    with modtrace.open_dataset(path) as dataset:
        assert len(dataset.notes) == 1 and "rank 1" in dataset.notes[0]
        assert dataset.sql("SELECT DISTINCT rank FROM calls").to_pylist() == [{"rank": 0}]


def test_run_is_chosen_by_the_begin_of_its_id_if_only_one_has_it(path: str) -> None:
    write_parquet(typed_recording("firm"), path)
    with modtrace.open_dataset(path, run="firs") as dataset:
        assert dataset.sql("SELECT DISTINCT run FROM calls").to_pylist() == [{"run": "first"}]
    with pytest.raises(ValueError, match="run='fir': the dataset has "):
        modtrace.open_dataset(path, run="fir")


def test_odd_texts_and_sizes_are_refused_or_answered(path: str) -> None:
    with modtrace.open_dataset(path) as dataset:
        with pytest.raises(ValueError, match="two columns are named 'a': name one of them with AS"):
            dataset.sql("SELECT 1 AS a, 2 AS a")
        assert dataset.sql("").num_rows == 0
        with pytest.raises(ValueError, match="DuckDB cannot run this"):
            dataset.sql("SELECT error('mine')")
        assert set(dataset.questions()) >= {"nonfinite", "replicas"}


def test_steps_that_were_left_out_are_told(path: str) -> None:
    with modtrace.open_dataset(path, steps="1:") as dataset:
        assert dataset.notes == ["only steps 1: were asked: what began before them is not seen"]
