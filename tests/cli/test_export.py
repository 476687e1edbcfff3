"""`modtrace export`: which format is meant, what is written, and what is said."""

import json
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import pytest

from builders import RecordingBuilder
from helpers.command_line import run_command
from helpers.exported import part_of
from modtrace.cli import export_formats
from modtrace.cli.export_formats import FORMATS, ExportFormat, ExportOptions
from modtrace.recording.meta import RunMeta
from modtrace.recording.protocols import RecordingData
from modtrace.store.copy import write_recording
from modtrace.store.export import export_names
from modtrace.store.writer import FolderWriter
from modtrace.views.common.numbers import format_bytes

TABLES = [
    "alive",
    "calls",
    "collectives",
    "compilations",
    "compiled_ops",
    "compiled_runs",
    "intervals",
    "modules",
    "ops",
    "parameters",
    "runs",
    "scalars",
    "sites",
    "steps",
    "tensors",
    "uses",
    "values",
]


class Printed(NamedTuple):
    """What a run of the command leaves."""

    code: int
    out: str
    err: str


Export = Callable[..., Printed]


@pytest.fixture
def export(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Export:
    """Runs `modtrace export` with the given arguments."""

    def run(*arguments: str) -> Printed:
        return Printed(run_command(monkeypatch, "export", *arguments), *capsys.readouterr())

    return run


@pytest.fixture(autouse=True)
def in_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The current directory holds `run.modtrace`, a recording without ops."""
    monkeypatch.chdir(tmp_path)
    build = RecordingBuilder(run_id="first", complete=True)
    net = build.module("", "Net")
    build.step(0, 0, 1000)
    build.call(net, 0, 600)
    write_recording(build.data(), "run.modtrace")


def size_of(folder: str) -> int:
    return sum(each.stat().st_size for each in Path(folder).rglob("*") if each.is_file())


def test_suffix_tells_the_format(export: Export) -> None:
    assert export("run.modtrace", "-o", "out.parquet").out == (
        f"wrote the folder out.parquet (parquet, 17 files, {format_bytes(size_of('out.parquet'))})\n"
    )
    assert sorted(os.listdir("out.parquet")) == TABLES
    assert os.listdir("out.parquet/calls/run=first/rank=0/block=0") == ["part-0.parquet"]

    printed = export("run.modtrace", "-o", "out.CSV").out
    assert printed == f"wrote the folder out.CSV (csv, 17 files, {format_bytes(size_of('out.CSV'))})\n"
    assert sorted(os.listdir("out.CSV")) == [f"{each}.csv" for each in TABLES]


def test_option_tells_the_format_whatever_the_suffix(export: Export) -> None:
    assert export("run.modtrace", "--format", "csv", "--output", "out.parquet").code == 0
    assert "calls.csv" in os.listdir("out.parquet")


def test_only_what_was_written_is_counted(export: Export) -> None:
    write_recording(RecordingBuilder(run_id="second").data(), "second.modtrace")
    assert export("run.modtrace", "-o", "both.parquet").code == 0
    found = json.loads(export("second.modtrace", "-o", "both.parquet", "--json").out)
    assert (found["format"], found["path"]) == ("parquet", "both.parquet")
    names = [f"both.parquet/{part_of(table, 'second')}" for table in export_names()]
    assert found["files"] == [{"path": each, "size_bytes": os.path.getsize(each)} for each in names]


def test_all_ranks_are_exported_to_parquet_unless_one_is_named(export: Export) -> None:
    for rank in range(3):
        FolderWriter("ranks.modtrace", RunMeta(run_id="r1", rank=rank, world_size=3)).close()
    assert export("ranks.modtrace", "-o", "all.parquet").code == 0
    assert sorted(os.listdir("all.parquet/calls/run=r1")) == ["rank=0", "rank=1", "rank=2"]
    assert export("ranks.modtrace/rank-00001", "-o", "one.parquet").code == 0
    assert os.listdir("one.parquet/calls/run=r1") == ["rank=1"]


def test_in_the_folder_of_a_rank_it_is_exported_alone(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, export: Export
) -> None:
    monkeypatch.chdir(tmp_path / "run.modtrace" / "rank-00000")
    assert export(".", "-o", "../../out.parquet").code == 0
    assert os.listdir(tmp_path / "out.parquet" / "calls" / "run=first") == ["rank=0"]


def error_of(printed: Printed) -> str:
    """The line that says what was wrong."""
    assert (printed.code, printed.out) == (2, "")
    return printed.err.removeprefix("modtrace: error: ").rstrip("\n")


def test_unknown_format_names_those_there_are(export: Export) -> None:
    error = error_of(export("run.modtrace", "-o", "out", "--format", "gif"))
    listed = ", ".join(f"'{each}'" for each in FORMATS)
    assert error == (
        f"Invalid value for '--format': 'gif' is not one of {listed}. Try 'modtrace export --help'."
    )


def test_path_that_tells_no_format_names_those_there_are(export: Export) -> None:
    error = error_of(export("run.modtrace", "-o", "out.gif"))
    assert error == (
        f"out.gif: its name tells no format. Give --format, one of: {', '.join(FORMATS)}. "
        "Try 'modtrace export --help'."
    )


@pytest.mark.parametrize("name", ["parquet", "csv"])
def test_path_that_cannot_be_written_is_one_line(name: str, export: Export) -> None:
    Path("file").write_text("mine")
    error = error_of(export("run.modtrace", "-o", "file/out", "--format", name))
    assert error == "file/out: cannot write the export here: Not a directory. Give another path."


def test_recording_itself_is_not_written_into(export: Export) -> None:
    error = error_of(export("run.modtrace", "-o", "run.modtrace", "--format", "csv"))
    assert error == (
        "run.modtrace: a folder that is no export is here already "
        "(it holds 'rank-00000', 'recording.json'). Give another path."
    )


def test_step_of_a_format_that_holds_all_is_misuse(export: Export) -> None:
    error = error_of(export("run.modtrace", "-o", "out.csv", "--step", "0"))
    assert error == (
        "--step: csv holds the whole recording. Leave the option out. Try 'modtrace export --help'."
    )


def write_note(data: RecordingData, path: Path, options: ExportOptions) -> None:
    """A writer of one file."""
    path.write_text(f"{data.meta.run_id} {options.step} {options.depth} {options.phase}")


NOTE = ExportFormat(
    writer=f"{__name__}:write_note",
    suffixes=(".note", ".txt"),
    about="a note",
    takes=frozenset({"step", "depth", "phase"}),
)


@pytest.fixture
def notes(monkeypatch: pytest.MonkeyPatch) -> None:
    """A format that writes one file."""
    monkeypatch.setitem(export_formats.FORMATS, "note", NOTE)


def test_format_of_one_file_gets_the_options(notes: None, export: Export) -> None:
    options = ["--step", "3", "--depth", "2", "--phase", "backward"]
    assert export("run.modtrace", "-o", "a.txt", *options).out == "wrote a.txt (note, 18B)\n"
    assert Path("a.txt").read_text() == "first 3 2 backward"


def test_what_the_system_says_of_the_path_is_one_line(notes: None, export: Export) -> None:
    error = error_of(export("run.modtrace", "-o", "gone/a.note"))
    assert error == "gone/a.note: cannot be written: No such file or directory. Give another path."


def test_format_of_ops_needs_a_recording_with_ops(
    notes: None, monkeypatch: pytest.MonkeyPatch, export: Export
) -> None:
    monkeypatch.setitem(export_formats.FORMATS, "note", replace(NOTE, tables=("ops",)))
    error = error_of(export("run.modtrace", "-o", "a.note"))
    assert error == ("run.modtrace: no ops were recorded. Record with ops=True (modtrace record --ops).")


@pytest.mark.parametrize("name", FORMATS)
def test_every_format_has_a_writer_and_suffixes_of_its_own(name: str) -> None:
    assert callable(FORMATS[name].load_writer())
    others = {suffix for other, each in FORMATS.items() if other != name for suffix in each.suffixes}
    assert FORMATS[name].suffixes and others.isdisjoint(FORMATS[name].suffixes)


@pytest.mark.parametrize("name", FORMATS)
def test_every_format_stands_in_the_help_and_on_its_page(name: str, export: Export) -> None:
    assert f"{name}: {FORMATS[name].about}" in " ".join(export("--help").out.split())
    page = (Path(__file__).parents[2] / "docs" / "export.md").read_text(encoding="utf-8")
    suffixes = ", ".join(f"`{each}`" for each in FORMATS[name].suffixes)
    assert f"| `{name}` | {FORMATS[name].about} | {suffixes} |" in page
