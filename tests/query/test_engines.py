"""DuckDB and Spark give the same answers, from the file systems that fsspec knows too."""

import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import modtrace
from helpers.command_line import run_command
from helpers.exported import typed_recording
from helpers.planted_dataset import PlantedRun
from modtrace.errors import RecordingExistsError
from modtrace.query.dataset import question_text, questions
from modtrace.query.views import tables, view_text
from modtrace.store.parquet import write_parquet

RUN = PlantedRun()


@pytest.mark.parametrize("question", questions())
def test_every_question_is_one_query_of_spark(question: str) -> None:
    import sqlglot

    [translated] = sqlglot.transpile(question_text(question), read="duckdb", write="spark")
    assert sqlglot.parse_one(translated, read="spark")


@pytest.fixture(scope="module")
def spark_program(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What a process of its own finds with Spark: a session is one for a process, and changes what it logs."""
    pytest.importorskip("pyspark", reason="make test-spark installs pyspark")
    folder = tmp_path_factory.mktemp("spark")
    RUN.write(folder / "runs.parquet")
    PlantedRun(run_id="it's", ranks=3).write(folder / "runs.parquet")
    (folder / "runs.parquet/runs/run=it%27s/rank=2/part-0.parquet").unlink()
    program = f"""
import json, sys
import modtrace
from modtrace.query.dataset import questions
from modtrace.query.views import partitions, tables, view_name
path = {str(folder / "runs.parquet")!r}
found = {{}}
for engine in ("duckdb", "spark"):
    with modtrace.open_dataset(path, engine) as dataset:
        found[engine] = {{question: dataset.ask(question).to_pylist() for question in questions()}}
        found[engine]["notes"] = dataset.notes
        found[engine]["names"] = []
        for table in tables():
            for name in (*(partitions(table).keys() - {{"block"}}), *tables()[table].names):
                column, view = view_name(name), view_name(table)
                dataset.sql(f"SELECT {{column}}, {{view}}.{{column}} AS other FROM {{view}} LIMIT 1")
                found[engine]["names"].append((view, column))
        try:
            dataset.sql("SELECT stepp FROM stats")
        except ValueError as error:
            found[engine]["error"] = str(error)
        try:
            dataset.sql("SELECT (")
        except ValueError as error:
            found[engine]["syntax"] = str(error)
    with modtrace.open_dataset(path, engine, run="it's", steps="5:30:5") as dataset:
        found[engine]["chosen"] = dataset.sql("SELECT DISTINCT run, rank, step FROM stats ORDER BY ALL").to_pylist()
print(json.dumps(found))
"""
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, cwd=folder, timeout=600
    )
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


@pytest.mark.spark
def test_spark_answers_as_duckdb_does(spark_program: dict[str, Any]) -> None:
    by_duckdb, by_spark = spark_program["duckdb"], spark_program["spark"]
    for question, expected in RUN.answers().items():
        rows = by_spark[question]
        assert rounded(rows) == rounded(by_duckdb[question]), question
        assert any(expected.items() <= row.items() for row in rows if row["run"] == "planted")
    for name in ("notes", "names", "chosen"):
        assert by_spark[name] == by_duckdb[name] != []
    assert "stepp" in by_spark["error"] and "stepp" in by_duckdb["error"]
    assert by_spark["error"].startswith("Spark cannot run this")
    assert "cannot be translated" in by_spark["syntax"]


def rounded(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [
        {name: float(f"{value:.9g}") if isinstance(value, float) else value for name, value in row.items()}
        for row in rows
    ]


def test_views_name_what_they_leave_out() -> None:
    for table in tables():
        text = view_text(table, "files", run="it's", left_out={"x": {1, 2}})
        assert "run = 'it''s'" in text and "NOT (run = 'x' AND rank IN (1, 2))" in text


@pytest.fixture
def s3(tmp_path: Path) -> Iterator[dict[str, Any]]:
    """A server of the S3 protocol on this machine, and the options that reach it."""
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port = found.getsockname()[1]
    with open(tmp_path / "moto.log", "w") as log:
        server = subprocess.Popen(
            [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)], stdout=log, stderr=log
        )
    try:
        for _ in range(600):
            with socket.socket() as asked:
                if asked.connect_ex(("127.0.0.1", port)) == 0:
                    break
            assert server.poll() is None, (tmp_path / "moto.log").read_text()
            time.sleep(0.05)
        yield {
            "key": "testing",
            "secret": "testing",
            "client_kwargs": {"endpoint_url": f"http://127.0.0.1:{port}"},
        }
    finally:
        server.kill()
        server.wait()


def check_store(url: str, options: dict[str, Any] | None) -> None:
    """Writes a dataset to an object store, twice, and asks it."""
    for rank in (0, 1):
        write_parquet(typed_recording("first", rank=rank), url, storage_options=options)
    files = write_parquet(typed_recording("first", head_ms=5), url, storage_options=options)
    assert all(file.startswith(f"{url}/") for file in files)
    with modtrace.open_dataset(url, storage_options=options) as dataset:
        assert dataset.ask("nonfinite").to_pylist()[0]["module"] == "head"
        took = dataset.sql(
            "SELECT rank, max(end_ns) AS ns FROM calls WHERE parent_call_id = 0 GROUP BY ALL ORDER BY ALL"
        )
        assert took.to_pylist() == [{"rank": 0, "ns": 7_000_000}, {"rank": 1, "ns": 5_000_000}]


def test_dataset_in_memory_is_written_and_asked() -> None:
    check_store("memory://bucket/runs", None)
    import fsspec

    store = fsspec.filesystem("memory")
    store.rm_file("/bucket/runs/runs/run=first/rank=1/part-0.parquet")
    with modtrace.open_dataset("memory://bucket/runs") as dataset:
        assert len(dataset.notes) == 1 and dataset.sql("SELECT DISTINCT rank FROM steps").to_pylist() == [
            {"rank": 0}
        ]
    store.pipe_file("/other/readme.txt", b"no export")
    with pytest.raises(
        RecordingExistsError, match="memory://other: a folder that is no export is here already"
    ):
        write_parquet(typed_recording(), "memory://other")


def test_dataset_on_s3_is_written_and_asked(s3: dict[str, Any]) -> None:
    import s3fs

    s3fs.S3FileSystem(**s3).mkdir("bucket")
    check_store("s3://bucket/runs.parquet", s3)


def test_commands_take_urls(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    with modtrace.record(to="run.modtrace"):
        torch.nn.Linear(2, 2)(torch.ones(1, 2))
    assert run_command(monkeypatch, "export", "run.modtrace", "-o", "memory://commands/runs") == 0
    assert capsys.readouterr().out.startswith("wrote the folder memory://commands/runs (parquet, ")
    assert run_command(monkeypatch, "query", "memory://commands/runs", "slowest-modules") == 0
    assert "Linear" in capsys.readouterr().out
    assert run_command(monkeypatch, "export", "run.modtrace", "--format", "csv", "-o", "memory://x") == 2
    assert "csv is written to a path on this machine" in capsys.readouterr().err
    assert run_command(monkeypatch, "export", "run.modtrace", "-o", "nonsense://x/y") == 2
    assert "nonsense" in capsys.readouterr().err
    assert sorted(os.listdir()) == ["run.modtrace"]
