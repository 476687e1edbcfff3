"""Messages name what users give in the words of the surface that they are for."""

import re
from pathlib import Path

import pytest

from cli.test_record import TRAIN
from helpers.command_line import run_command
from modtrace.recording.options.schedule import to_step_range
from modtrace.surface import choose_phrase, name_argument, speak


def test_argument_has_the_name_of_python_unless_another_surface_is_spoken_to() -> None:
    assert name_argument("steps", "5:5") == "steps='5:5'"
    with speak(lambda name, value: f"--{name} {value}"):
        assert name_argument("steps", "5:5") == "--steps 5:5"
        with speak(None):
            assert choose_phrase(python="values=None", command_line="--values none") == "values=None"
        assert choose_phrase(python="values=None", command_line="--values none") == "--values none"
    assert choose_phrase(python="values=None", command_line="--values none") == "values=None"


def test_surface_is_python_again_after_an_exception() -> None:
    with (
        pytest.raises(ValueError, match=re.escape("--steps holds no step")),
        speak(lambda name, value: f"--{name}"),
    ):
        to_step_range("5:5")
    assert name_argument("steps", "5:5") == "steps='5:5'"


#: What only Python says: `steps='3'`, `record(...)`, `ops=True`, `Capture(`, `modtrace.Capture`.
WORDS_OF_PYTHON = re.compile(r"\b\w+=(?:['\"(\[]|True|False|None)|\w\(\.{3}|\bCapture\(|modtrace\.[A-Z]")


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--steps", "3"], "--steps 3 is not START:STOP[:EVERY], such as 100:200 or 0::50."),
        (
            ["--steps", "30:10"],
            "--steps 30:10 holds no step: START counts from 0, STOP lies beyond it, EVERY is",
        ),
        (["--include", "re:("], "--include 're:(' is not a regular expression: missing )"),
        (["--exclude", "a", "--exclude", "b["], "--exclude 'b[' is not a glob: "),
        (
            ["--values", "none", "--include", "x"],
            "--include and --exclude choose what is measured, and --values none measures nothing.",
        ),
        (
            ["--capture", "stats", "--exclude", "x"],
            "with --capture say include and exclude there: --capture 'include=",
        ),
        (
            ["--capture", "rols=x"],
            "--capture rols=x cannot be read: a capture has no 'rols'. Did you mean 'roles'?",
        ),
        (
            ["--capture", "stats=7"],
            "--capture stats=7 cannot be read: stats=7: give 0 for none, 1 for the usual ones",
        ),
        (["--capture", "steps=9"], "--capture steps=9 cannot be read: steps=9 is not START:STOP[:EVERY]"),
        (
            ["--capture", "tensors=no"],
            "--capture tensors=no cannot be read: tensors=no: give 'lazy', or no value.",
        ),
        (
            ["--capture", "micro_batches roles=output"],
            "--capture 'micro_batches roles=output' cannot be read: micro_batches is about parameters'",
        ),
        (["--capture", "roles=leaf"], "--capture 'roles=leaf' looks at what ops return: it takes --ops."),
        (["--capture", "on_trigger=2"], "--capture on_trigger=2 waits for a trigger: give --keep-last."),
        (["--capture", "stats"] * 99, "there are 99 captures, and "),
        (
            ["--to", "there"],
            "there: there is a recording here already. Give another path, or --overwrite to replace it.",
        ),
        (["--bogus"], "No such option '--bogus'"),
    ],
)
def test_record_speaks_of_options(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    options: list[str],
    said: str,
) -> None:
    (tmp_path / "train.py").write_text(TRAIN)
    (tmp_path / "there").mkdir()
    (tmp_path / "there" / "recording.json").write_text(
        '{"schema_version": 1, "run_id": "old", "created": ""}'
    )
    monkeypatch.chdir(tmp_path)
    assert run_command(monkeypatch, "record", *options, "train.py") == 2
    error = capsys.readouterr().err
    assert error.startswith(f"modtrace: error: {said}")
    assert not WORDS_OF_PYTHON.search(error)
    assert not re.search(r"[?.][.]", error.replace("...", ""))
