"""Wrong options of the command line are named, with what to do instead."""

import re
from pathlib import Path

import pytest

from cli.test_record import TRAIN
from helpers.command_line import run_command


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (
            ["--steps", "3"],
            "Invalid value for --steps: steps='3' is not START:STOP[:EVERY], such as 100:200 or 0::50.",
        ),
        (
            ["--steps", "30:10"],
            "Invalid value for --steps: steps='30:10' holds no step: START counts from 0, STOP lies beyond it,",
        ),
        (
            ["--include", "re:("],
            "Invalid value for --include: include[0]='re:(' is not a regular expression: missing )",
        ),
        (
            ["--exclude", "a", "--exclude", "b["],
            "Invalid value for --exclude: exclude[1]='b[' is not a glob: ",
        ),
        (
            ["--values", "none", "--include", "x"],
            "include and exclude choose what is measured, and values=None (--values none) measures nothing.",
        ),
        (
            ["--capture", "stats", "--exclude", "x"],
            "with values=Capture(...) say include and exclude there: Capture(include=...) (--capture 'include=",
        ),
        (
            ["--capture", "rols=x"],
            "Invalid value for --capture: capture='rols=x' cannot be read: a capture has no 'rols'. Did you mean",
        ),
        (
            ["--capture", "stats=7"],
            "Invalid value for --capture: capture='stats=7' cannot be read: stats=7: give 0 for none, 1 for the usual",
        ),
        (
            ["--capture", "steps=9"],
            "Invalid value for --capture: capture='steps=9' cannot be read: steps='9' is not START",
        ),
        (
            ["--capture", "tensors=no"],
            "Invalid value for --capture: capture='tensors=no' cannot be read: tensors='no': give True, False or",
        ),
        (
            ["--capture", "micro_batches roles=output"],
            "Invalid value for --capture: capture='micro_batches roles=output' cannot be read: micro_batches=True",
        ),
        (
            ["--capture", "roles=leaf"],
            "Capture(roles='leaf') looks at what ops return: it takes record(ops=True) (--ops)",
        ),
        (
            ["--capture", "on_trigger=2"],
            "Capture(on_trigger=2) waits for a trigger: give record(triggers=...) or keep_last= (--k",
        ),
        (["--capture", "stats"] * 99, "values holds 99 captures, and "),
        (
            ["--to", "there"],
            "there: there is a recording here already. Give another path, or overwrite=True (--overwrite)",
        ),
        (["--bogus"], "No such option '--bogus'"),
    ],
)
def test_wrong_option_is_named(
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
    assert not re.search(r"[?.][.]", error.replace("...", ""))
