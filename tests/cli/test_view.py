"""`modtrace view`: the file it writes, and what it says."""

import math
import os
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from builders import RecordingBuilder
from helpers.command_line import Command
from helpers.growing_run import GrowingRun
from helpers.report_pages import read_payload
from modtrace.analysis.divergence.answer import Comparison
from modtrace.analysis.divergence.compare import compare_recordings
from modtrace.analysis.tables.ranks import RanksData
from modtrace.api import report
from modtrace.api.recording import open_recording
from modtrace.recording.protocols import RecordingData
from modtrace.store.copy import write_recording
from modtrace.store.reader import FolderReader
from modtrace.views.html.page import size_without_data


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    build = RecordingBuilder(argv=("train.py",), complete=True)
    net = build.module("", "Net")
    for step in range(2):
        build.step(step, 10 * step, 10 * step + 9)
        build.output(build.call(net, 10 * step, 10 * step + 5, nth=0), [1.0])
    path = tmp_path / "run.modtrace"
    write_recording(build.data(), path)
    monkeypatch.chdir(tmp_path)
    return path


def test_report_is_written_beside_where_one_is_and_its_path_is_printed(command: Command, run: Path) -> None:
    printed = command("view", str(run)).out
    size = os.path.getsize("run.html")
    assert printed == f"run.html: {size / 1e3:.0f}kB. Open it in a browser.\n"
    assert Path("run.html").read_text(encoding="utf-8").startswith("<!doctype html>")


def test_a_step_can_be_chosen_and_an_existing_file_is_replaced(command: Command, run: Path) -> None:
    Path("a.html").write_text("an older one", encoding="utf-8")
    command("view", str(run), "-o", "a.html", "--step", "first")
    first = Path("a.html").read_text(encoding="utf-8")
    command("view", str(run), "-o", "a.html", "--step", "0")
    assert Path("a.html").read_text(encoding="utf-8") == first
    open_recording(run).write_html("a.html")
    assert Path("a.html").read_text(encoding="utf-8") != first


def test_report_can_be_printed(command: Command, run: Path) -> None:
    assert command("view", str(run), "-o", "-").out.rstrip().endswith("</html>")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--step", "7"], "no step 7 in this recording; there are: 0..1. Try 'modtrace view --help'."),
        (
            ["--max-mb", "0"],
            "Invalid value for --max-mb: max_mb=0.0: give more megabytes. Try 'modtrace view --help'.",
        ),
        (
            ["--max-mb", "nan"],
            "Invalid value for --max-mb: max_mb=nan: give more megabytes. Try 'modtrace view --help'.",
        ),
        (
            ["--max-mb", "0.01"],
            "Invalid value for --max-mb: max_mb=0.01: give more megabytes. "
            "The smallest report of this recording has 0.2. Try 'modtrace view --help'.",
        ),
        (
            ["-o", "missing/x.html"],
            "missing/x.html: cannot be written: No such file or directory. Give another path.",
        ),
    ],
)
def test_what_cannot_be_is_refused(command: Command, run: Path, arguments: list[str], message: str) -> None:
    assert command("view", str(run), *arguments, code=2).err == f"modtrace: error: {message}\n"
    assert list(Path().glob("*.html")) == []


def test_marks_are_told_on_standard_error(
    command: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    build = RecordingBuilder(marks=("cut at step 3",))
    build.step(0, 0, 10)
    build.call(build.module("", "Net"), 0, 5, nth=0)
    write_recording(build.data(), tmp_path / "cut.modtrace")
    monkeypatch.chdir(tmp_path)
    assert command("view", "cut.modtrace").err == "! cut at step 3\n"


def test_a_recording_of_nothing_has_a_page_that_says_so_and_the_exit_code_is_2(
    command: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_recording(RecordingBuilder(complete=True).data(), tmp_path / "empty.modtrace")
    monkeypatch.chdir(tmp_path)
    assert command("view", "empty.modtrace", code=2).err == (
        "modtrace: error: empty.modtrace: Nothing was recorded: no calls are in this recording: no module was called "
        "in its steps. Record a program that calls a torch.nn.Module in its steps.\n"
    )
    assert (tmp_path / "empty.html").exists()


def test_large_values_are_thinned_until_the_file_fits(run: Path, tmp_path: Path) -> None:
    build = RecordingBuilder(complete=True)
    net = build.module("", "Net")
    sites = [build.site(net, "parameter", f"p{n}") for n in range(20)]
    for step in range(200):
        build.step(step, 10 * step, 10 * step + 9)
        for n, site in enumerate(sites):
            build.value(site, [0.1 + step * n / 7, 2.0 + n / 3], phase="optimizer")
    write_recording(build.data(), tmp_path / "long.modtrace")
    recording = open_recording(tmp_path / "long.modtrace")
    recording.write_html("whole.html")
    allowed = size_without_data() + 21_000  # what there is room for does not depend on the page
    recording.write_html("less.html", max_mb=allowed / 1e6)
    assert os.path.getsize("less.html") < allowed < os.path.getsize("whole.html")
    recording.write_html("any.html", max_mb=math.inf)
    assert Path("any.html").read_bytes() == Path("whole.html").read_bytes()


def test_size_is_that_of_the_bytes_and_not_of_the_characters(
    run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(report, "render_report", lambda _: "é" * 60_000)
    with pytest.raises(ValueError, match=r"has 0\.1"):
        open_recording(run).write_html("a.html", max_mb=0.1)


def test_notebook_shows_the_page_in_a_frame(run: Path) -> None:
    shown = open_recording(run).view(height=300)
    assert shown._repr_html_().startswith("<iframe sandbox=")
    assert repr(shown) == "a report, which notebooks show; Recording.write_html(path) writes it to a file"


def test_report_opens_with_where_the_recording_and_another_one_part(
    command: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, last in (("a", 2.0), ("b", 3.0)):
        build = RecordingBuilder(complete=True)
        net = build.module("", "Net")
        fc = build.module("fc", "Linear", parent=net)
        for step, number in ((4, last), (5, 1.0)):
            build.step(step, 100 * step, 100 * step + 90)
            root = build.call(net, 100 * step, 100 * step + 60, nth=0)
            build.output(build.call(fc, 100 * step + 10, 100 * step + 50, parent=root, nth=0), [1.0, number])
        write_recording(build.data(), tmp_path / f"{name}.modtrace")
    monkeypatch.chdir(tmp_path)
    command("view", "a.modtrace", "--against", "b.modtrace")
    payload = read_payload(Path("a.html").read_text(encoding="utf-8"))
    [found] = payload["findings"]
    assert (found["title"], found["severity"]) == ("the runs part at output of fc, step 4, forward", "error")
    assert "  first   float32[2], 1 .. 2, rms 1.58114" in found["lines"]
    assert (found["module"], found["step"], payload["shown_step"]) == (1, 0, 0)
    command("view", "a.modtrace", "--against", "a.modtrace")
    payload = read_payload(Path("a.html").read_text(encoding="utf-8"))
    assert [each["severity"] for each in payload["findings"]] == ["good"]
    assert (
        command("view", "a.modtrace", "--against", "c.modtrace", code=2)
        .err.splitlines()[-1]
        .startswith("modtrace: error: c.modtrace: ")
    )


def test_page_of_two_runs_names_both_and_how_their_modules_differ(
    command: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, last, modules in (("a", 2.0, ["fc"]), ("b", 3.0, ["fc", "norm"])):
        build = RecordingBuilder(complete=True)
        net = build.module("", "Net")
        build.step(0, 0, 90)
        root = build.call(net, 0, 60, nth=0)
        for at, module in enumerate(modules):
            child = build.module(module, "Linear", parent=net)
            build.output(build.call(child, 10 + 9 * at, 18 + 9 * at, parent=root, nth=0), [1.0, last])
        write_recording(build.data(), tmp_path / f"{name}.modtrace")
    monkeypatch.chdir(tmp_path)
    command("view", "a.modtrace", "--against", "b.modtrace", "--map", "fc=fc")
    payload = read_payload(Path("a.html").read_text(encoding="utf-8"))
    assert payload["compared"] == {"names": ["a.modtrace", "b.modtrace"], "finding": 0, "advice": ""}
    assert payload["tables"]["modules"]["rows"] == payload["tables"]["second_modules"]["rows"] == 3
    assert "compared" in payload and payload["dictionaries"]["modules.path"] == ["", "fc", "norm"]
    command("view", "a.modtrace")
    assert read_payload(Path("a.html").read_text(encoding="utf-8"))["compared"] is None


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--map", "fc=fc"], "give the other recording, too: --against OTHER"),
        (["--against", "b.modtrace", "--map", "nothing=fc"], "map='nothing=fc' matches no module"),
        (["--against", "empty.modtrace"], "a.modtrace and empty.modtrace: "),
        (["--against", "damaged.modtrace"], "damaged.modtrace"),
    ],
)
def test_runs_that_cannot_be_compared_are_refused_as_compare_refuses_them(
    command: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, options: list[str], message: str
) -> None:
    for name, values in (("a", True), ("b", True), ("empty", False), ("damaged", True)):
        build = RecordingBuilder(complete=True)
        net = build.module("", "Net")
        build.step(0, 0, 90)
        root = build.call(net, 0, 60, nth=0)
        if values:
            build.output(
                build.call(build.module("fc", "Linear", parent=net), 10, 20, parent=root, nth=0), [1.0]
            )
        write_recording(build.data(), tmp_path / f"{name}.modtrace")
    next((tmp_path / "damaged.modtrace").rglob("values*.arrow")).write_bytes(b"no arrow" * 99)
    monkeypatch.chdir(tmp_path)
    told = command("view", "a.modtrace", *options, code=2).err
    assert message in told and "Traceback" not in told
    assert not Path("a.html").exists()


def test_every_rank_of_a_run_that_is_being_written_is_compared_as_it_is_at_one_moment(
    command: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A step of each rank is written whenever a table is read."""
    runs = [
        GrowingRun(tmp_path / name, steps=300, rank=rank, world_size=2, run_id=name)
        for name in ("a", "b")
        for rank in range(2)
    ]
    read = FolderReader._read
    seen: list[dict[str, int]] = []

    def grow_and_read(self: FolderReader, name: str) -> pa.Table:
        for run in runs:
            run.go_on()
        return read(self, name)

    def compare(a: RecordingData, b: RecordingData, **options: Any) -> Comparison:
        for data in (a, b):
            assert isinstance(data, RanksData)
            seen.extend(
                {name: of_rank.table(name).num_rows for name in ("steps", "calls", "values")}
                for _, of_rank in data.ranks
            )
        return compare_recordings(a, b, **options)

    monkeypatch.setattr(FolderReader, "_read", grow_and_read)
    monkeypatch.setattr("modtrace.cli.view.compare_recordings", compare)
    command("view", str(tmp_path / "a"), "--against", str(tmp_path / "b"), "-o", str(tmp_path / "page.html"))
    assert len(seen) == 4
    for counts in seen:
        assert counts["steps"] <= counts["calls"] < 300
        assert counts["values"] <= counts["calls"]
    for run in runs:
        run.close()
