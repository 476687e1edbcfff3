"""Recordings of older schema versions give the answers that they gave at the time; `data/record.py` made them."""

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from pprint import pformat
from typing import Any

import pytest
from pyarrow import ipc

import modtrace
from golden import assert_golden
from helpers.command_line import run_command
from modtrace.cli.main import COMMANDS
from modtrace.recording.schema import schemas

DATA = Path(__file__).parent / "data"

#: What version 2 has added.
NEW_TABLES = [
    "alive",
    "collectives",
    "compilations",
    "compiled_ops",
    "compiled_runs",
    "intervals",
    "parameters",
]
NEW_COLUMNS = {
    "calls": ["compilation_id", "micro_batch", "stage", "training"],
    "ops": ["compilation_id", "kernel", "stream", "device_start_ns", "device_end_ns"],
    "values": [
        "first_index",
        "placements",
        "mesh",
        "global_shape",
        "global_offset",
        "micro_batch",
        "stage",
        "requires_grad",
    ],
    "steps": ["uncleared", "next_start_ns", "resident_bytes", "device_bytes"],
}

#: All commands that read a recording.
ARGUMENTS = [
    "show run.modtrace",
    "show run.modtrace --slots --sort total --no-fold",
    "show run.modtrace --json",
    "ops run.modtrace",
    "ops run.modtrace --by op --json",
    "memory run.modtrace --ops",
    "paths run.modtrace",
    "graph run.modtrace -o graph.dot --color time",
    "timeline run.modtrace -o run.trace.json --op-flows",
    "plot run.modtrace -o plot.png",
    "plot run.modtrace --json",
    "export run.modtrace -o run.parquet",
    "export run.modtrace -o run.csv",
    "export run.modtrace -o explorer.json --format model-explorer",
    "nonfinite run.modtrace",
    "nonfinite run.modtrace --json",
]
READ_NO_RECORDING = {"record", "verify", "doctor"}

#: Commands that there were not then.
NEWER = {"check", "compare", "query", "ranks", "recompute", "view"}

#: What is asked in Python; the commands show what else there is.
QUESTIONS: dict[str, Callable[[modtrace.Recording], Any]] = {
    "first_nonfinite": lambda rec: rec.first_nonfinite(),
    "frame": lambda rec: {name: len(rec.frame(name)) for name in schemas() if name not in NEW_TABLES},
    "history": lambda rec: rec.history("**", stat="std"),
    "meta": lambda rec: rec.meta,
    "stack": lambda rec: rec.stack("norm", step=1).values.tolist(),
    "tensor": lambda rec: rec.tensor("norm", 1).tolist(),
    "tensors": lambda rec: [(step, each.tolist()) for step, each in rec.tensors("norm")],
    "to_polars": lambda rec: len(rec.to_polars()),
    "triggers": lambda rec: rec.triggers,
}


@pytest.fixture(params=["all", "kept"])
def recording(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """The name of a recording of version 1, which is `run.modtrace` in the current folder."""
    monkeypatch.chdir(tmp_path)
    shutil.unpack_archive(DATA / "version-1.tar.xz", filter="data")
    Path(f"{request.param}.modtrace").rename("run.modtrace")
    return str(request.param)


def test_commands_answer_of_version_1_as_they_did(
    recording: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert {each.split()[0] for each in ARGUMENTS} | READ_NO_RECORDING | NEWER == set(COMMANDS)
    told = []
    for arguments in ARGUMENTS:
        code = run_command(monkeypatch, *arguments.split())
        out, err = capsys.readouterr()
        told.append(f"$ modtrace {arguments}\n{_stable(out)}{err}exit code {code}\n")
    assert_golden(str(DATA / f"version-1-{recording}-commands.txt"), "\n".join(told))


def test_python_answers_of_version_1_as_it_did(recording: str) -> None:
    rec = modtrace.open_recording("run.modtrace")
    told = []
    for name in QUESTIONS:
        told.append(f"rec.{name}\n{_without_none(_ask(rec, name))}\n")
    assert_golden(str(DATA / f"version-1-{recording}-python.txt"), "\n".join(told))


def _ask(rec: modtrace.Recording, name: str) -> Any:
    try:
        return QUESTIONS[name](rec)
    except (ValueError, modtrace.ModtraceError) as error:  # one of them holds no whole tensors
        return f"{type(error).__name__}: {error}"


@pytest.mark.parametrize("name", schemas())
def test_tables_of_version_1_hold_what_their_files_hold(recording: str, name: str) -> None:
    table = modtrace.open_recording("run.modtrace").table(name)
    if name in NEW_TABLES:
        assert table.num_rows == 0
        return
    stored = ipc.open_stream(Path(f"run.modtrace/rank-00000/{name}.arrow").read_bytes()).read_all()
    assert str(table.select(stored.column_names).to_pylist()) == str(stored.to_pylist())  # NaN is not itself
    new = NEW_COLUMNS.get(name, [])
    assert [each for each in table.column_names if each not in stored.column_names] == new
    assert [table[each].null_count for each in new] == [table.num_rows] * len(new)


def _stable(out: str) -> str:
    """Leaves out what is null in JSON, as what came later is, and how many files of tables there are."""
    if out.startswith("{"):
        return json.dumps(_without_nulls(json.loads(out))) + "\n"
    return re.sub(r"\d+ files, [\d.]+\w?B", "files", out)


def _without_nulls(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _without_nulls(each) for key, each in value.items() if each is not None}
    return [_without_nulls(each) for each in value] if isinstance(value, list) else value


def _without_none(answer: Any) -> str:
    return re.sub(r",\s+\w+=None|\w+=None,\s+", "", pformat(answer, width=120))
