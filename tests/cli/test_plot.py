"""`modtrace plot`."""

import json
from pathlib import Path

import pytest

from builders import RecordingBuilder, TypedRecording
from helpers.command_line import Command
from helpers.typed_runs import typed_run
from modtrace.api.recording import open_recording
from modtrace.store.copy import write_recording

pytest.importorskip("matplotlib")


@pytest.fixture
def folder(tmp_path: Path) -> str:
    write_recording(typed_run(), tmp_path / "run.modtrace")
    return str(tmp_path / "run.modtrace")


def test_a_picture_is_written_and_named(command: Command, folder: str, tmp_path: Path) -> None:
    path = tmp_path / "plot.png"
    assert (
        command("plot", folder, "blocks.*", "-o", str(path), "--kind", "heatmap", "--stat", "max").out
        == f"wrote {path}\n"
    )
    open_recording(folder).write_plot(tmp_path / "same.png", "blocks.*", kind="heatmap", stat="max")
    assert path.read_bytes() == (tmp_path / "same.png").read_bytes()


def test_json_has_the_numbers_of_the_picture(command: Command, folder: str) -> None:
    arguments = ["blocks.0", "blocks.1", "--stat", "min", "--role", "grad_output", "--steps", "1:", "--json"]
    assert json.loads(command("plot", folder, *arguments).out) == {
        "steps": [1, 2],
        "sites": ["blocks.0", "blocks.1"],
        "values": [[-1.0, -2.0], [-2.0, -2.0]],
        "stat": "min",
        "role": "grad_output",
        "measured": [[True, True], [True, True]],
        "nonfinite": [[False, False], [False, False]],
        "kinds": ["train", "train"],
        "others_before": [0, 0],
        "marks": ["copied before the recording was closed"],
    }


def test_histogram_of_a_step_has_a_row_a_site(command: Command, tmp_path: Path) -> None:
    run = str(tmp_path / "run.modtrace")
    write_recording(typed_run(histogram=[0] * 127 + [2] + [0] * 128, zero_count=0), run)
    found = json.loads(command("plot", run, "blocks.*", "--kind", "histogram", "--step", "1", "--json").out)
    assert (found["steps"], found["sites"]) == ([1, 1, 1], ["blocks.0", "blocks.1", "blocks.2"])
    assert [row[127] for row in found["shares"]] == [1.0, 1.0, 1.0]


NAMES = ("a[0]", "b*", "c?", "[!d]", "d e", "größe", "层层", "$x$", "$\\frac$", "_y", "{z}", "%s")


def odd_names() -> TypedRecording:
    """A module of each name, called in two steps."""
    build = RecordingBuilder(complete=True)
    net = build.module("", "Net")
    parts = [build.module(f"parts.{name}", "Linear", parent=net) for name in NAMES]
    for step in (0, 1):
        build.step(step, 1000 * step, 1000 * step + 900)
        outer = build.call(net, 1000 * step, 1000 * step + 500)
        for at, part in enumerate(parts):
            call = build.call(part, 1000 * step + at, 1000 * step + at, parent=outer)
            build.output(call, [1.0 + at], histogram=[0] * 127 + [1] + [0] * 128, zero_count=0)
    return build.data()


@pytest.mark.filterwarnings("ignore:Glyph")
def test_paths_with_brackets_and_other_characters_can_be_plotted(command: Command, tmp_path: Path) -> None:
    run = str(tmp_path / "run.modtrace")
    write_recording(odd_names(), run)
    for name in NAMES:  # of which no other is meant by one as a glob
        assert json.loads(command("plot", run, f"parts.{name}", "--json").out)["sites"] == [f"parts.{name}"]
        path = tmp_path / "plot.svg"
        assert command("plot", run, f"parts.{name}", "-o", str(path)).out == f"wrote {path}\n"
        assert f"<!-- parts.{name} -->" in path.read_text()
    for kind in ("lines", "heatmap"):
        command("plot", run, "parts.*", "-o", str(path), "--kind", kind)
    assert all(f"<!-- parts.{name} -->" in path.read_text() for name in NAMES)
    histogram = ("--kind", "histogram", "-o", str(path))
    command("plot", run, "parts.$\\frac$", *histogram)
    assert "<!-- outputs: parts.$\\frac$ -->" in path.read_text()


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (
            ["blks.*", "-o", "x.png"],
            "path='blks.*' matches no module with role='output'; the nearest are: blocks.0",
        ),
        (["-o", "x.gif"], "Invalid value for --output: x.gif: a plot's name ends in .png, .svg, .pdf"),
        (
            ["-o", "x.png", "--stat", "abs"],
            "Invalid value for --stat: stat='abs': there is no such statistic.",
        ),
        (["-o", "x.png", "--kind", "histogram", "blocks.0"], "no histograms were recorded of these tensors."),
        (["-o", "x.png", "--step", "1"], "Invalid value for --step: step=1 is for kind='histogram'."),
        ([], "give -o FILE for a picture, or --json for its numbers."),
    ],
)
def test_misuse_is_exit_code_2_with_what_to_do(
    command: Command, arguments: list[str], text: str, folder: str
) -> None:
    assert command("plot", folder, *arguments, code=2).err.startswith(f"modtrace: error: {text}")
