"""`modtrace compare`."""

import json
from collections.abc import Sequence
from pathlib import Path

import pytest

from builders import RecordingBuilder, TypedRecording
from helpers.command_line import Command
from modtrace.store.copy import write_recording


def recording(first: Sequence[float], second: Sequence[float], argv: str = "train.py") -> TypedRecording:
    build = RecordingBuilder(argv=(argv,), complete=True)
    net = build.module("", "Net")
    modules = [build.module(name, "Linear", parent=net) for name in ("up", "down")]
    build.step(0, 0, 100)
    outer = build.call(net, 0, 90, nth=0)
    for at, (module, numbers) in enumerate(zip(modules, (first, second), strict=True)):
        call = build.call(module, 10 + 20 * at, 20 + 20 * at, parent=outer, nth=0)
        build.output(call, numbers)
    return build.data()


@pytest.fixture
def runs(tmp_path: Path) -> tuple[str, str, str]:
    paths = tuple(str(tmp_path / f"{name}.modtrace") for name in "abc")
    write_recording(recording([1.0, 2.0], [3.0, 4.0]), paths[0])
    write_recording(recording([1.0, 2.0], [3.0, 4.5]), paths[1])
    write_recording(recording([1.0, 2.0], [3.0, 4.0], argv="other.py"), paths[2])
    return paths[0], paths[1], paths[2]


def test_a_difference_is_exit_code_1_and_stands_on_the_first_lines(
    command: Command, runs: tuple[str, str, str]
) -> None:
    assert command("compare", runs[0], runs[1], code=1).out.splitlines()[:6] == [
        "the runs part at output of down, step 0, forward",
        "  what was measured before it is equal; its inputs were not compared",
        "  relative error 1.1e-01, noise is 5.8e-07",
        "  first   float32[2], 3 .. 4, rms 3.53553",
        "  second  float32[2], 3 .. 4.5, rms 3.82426",
        "  ops were not compared: record both runs with ops=True (--ops) to see which of them made it",
    ]


def test_a_tolerated_difference_is_exit_code_0(command: Command, runs: tuple[str, str, str]) -> None:
    assert (
        "equal, up to noise: no difference is more than that"
        in command("compare", runs[0], runs[1], "--tolerance", "0.2").out
    )


def test_answer_comes_before_the_difference_of_the_environments(
    command: Command, runs: tuple[str, str, str]
) -> None:
    lines = command("compare", runs[0], runs[2]).out.splitlines()
    assert lines[0] == "equal: nothing that was compared differs"
    assert lines[3] == "environments: command: train.py / other.py"


def test_json_has_all_fields_and_no_number_that_is_not_finite(
    command: Command, runs: tuple[str, str, str]
) -> None:
    told = json.loads(command("compare", runs[0], runs[1], "--json", code=1).out)
    assert (told["ok"], told["first"]["path"], told["first"]["amplification"]) == (False, "down", "Infinity")
    assert told["first"]["error"] == pytest.approx(0.5 / 4.5)


def test_a_picture_with_an_unknown_ending_is_refused_before_anything_is_read(command: Command) -> None:
    assert (
        "growth.txt: a plot's name ends in .png, .svg, .pdf"
        in command("compare", "a", "b", "-o", "growth.txt", code=2).err
    )


def test_the_growth_is_drawn(command: Command, runs: tuple[str, str, str], tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    picture = tmp_path / "growth.svg"

    command("compare", runs[0], runs[1], "-o", str(picture), code=1)
    assert "relative error" in picture.read_text()


@pytest.mark.parametrize(
    ("step", "said"),
    [
        ("7", "step=7 of the first recording: no step 7 in this recording; there are: 0."),
        ("0:7", "step=7 of the second recording: no step 7 in this recording; there are: 0."),
        ("0:", "'0:': '' is no step: give a number, -1 for the last, or first"),
    ],
)
def test_a_step_that_one_recording_lacks_is_named_with_it(
    command: Command, step: str, said: str, runs: tuple[str, str, str]
) -> None:
    assert (
        f"Invalid value for --step: {said}"
        in command("compare", runs[0], runs[1], "--step", step, code=2).err
    )
