"""Wrong options of the command line are named, with what to do instead."""

import re
from pathlib import Path

import pytest

from cli.processes.test_record import TRAIN
from helpers.command_line import Command

SCHEDULE = "such as 100:200 or 0::50."


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--steps", "3"], f"Invalid value for --steps: steps='3' is not START:STOP[:EVERY], {SCHEDULE}"),
        (
            ["--steps", "30:10"],
            "Invalid value for --steps: steps='30:10' holds no step: START counts from 0, STOP lies beyond it, "
            "EVERY is at least 1.",
        ),
        (
            ["--include", "re:("],
            "Invalid value for --include: include[0]='re:(' is not a regular expression: missing ), unterminated "
            "subpattern at position 0 of '(', before '('. Correct it, or leave out 're:' for a glob.",
        ),
        (
            ["--exclude", "a", "--exclude", "b["],
            "Invalid value for --exclude: exclude[1]='b[' is not a glob: the [ at position 1 is not closed. "
            "Correct it ([[] is a [ itself), or begin with 're:' for an expression.",
        ),
        (
            ["--values", "none", "--include", "x"],
            "include and exclude (--include, --exclude) choose what is measured, and values=None (--values none) "
            "measures nothing.",
        ),
        (
            ["--capture", "stats", "--exclude", "x"],
            "with values=Capture(...) say include and exclude there: Capture(include=...) "
            "(--capture 'include=...').",
        ),
        (
            ["--capture", "rols=x"],
            "Invalid value for --capture: capture='rols=x' cannot be read: a capture has no 'rols'. Did you mean "
            "'roles'? There are: roles, types, ops, include, exclude, steps, stats, sample, on_trigger, channel_dim, "
            "hash, sketch, micro_batches, tensors.",
        ),
        (
            ["--capture", "stats=7"],
            "Invalid value for --capture: capture='stats=7' cannot be read: stats=7: give 0 for none, 1 for the "
            "usual ones, 2 for all.",
        ),
        (
            ["--capture", "steps=9"],
            "Invalid value for --capture: capture='steps=9' cannot be read: steps='9' is not START:STOP[:EVERY], "
            f"{SCHEDULE}",
        ),
        (
            ["--capture", "tensors=no"],
            "Invalid value for --capture: capture='tensors=no' cannot be read: tensors='no': give True "
            "(--capture tensors), False or 'lazy' (--capture tensors=lazy).",
        ),
        (
            ["--capture", "micro_batches roles=output"],
            "Invalid value for --capture: capture='micro_batches roles=output' cannot be read: micro_batches=True "
            "is about parameters' gradients: it takes the role 'parameter_grad'.",
        ),
        (
            ["--capture", "roles=leaf"],
            "Capture(roles='leaf') (--capture roles=leaf) looks at what ops return: it takes record(ops=True) "
            "(--ops).",
        ),
        (
            ["--capture", "on_trigger=2"],
            "Capture(on_trigger=2) (--capture on_trigger=2) waits for a trigger: "
            "give record(triggers=...) or keep_last= (--keep-last).",
        ),
        (["--capture", "stats"] * 99, "values (--capture) holds 99 captures, and 40 are the most."),
        (
            ["--to", "there"],
            "there: there is a recording here already. Give another path, or overwrite=True (--overwrite) to "
            "replace it.",
        ),
        (["--bogus"], "No such option '--bogus'. Did you mean '--ops'?"),
    ],
)
def test_wrong_option_is_named(
    command: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, options: list[str], said: str
) -> None:
    (tmp_path / "train.py").write_text(TRAIN)
    (tmp_path / "there").mkdir()
    (tmp_path / "there" / "recording.json").write_text(
        '{"schema_version": 1, "run_id": "old", "created": ""}'
    )
    monkeypatch.chdir(tmp_path)
    error = command("record", *options, "train.py", code=2).err
    hint = "" if options[0] == "--to" else " Try 'modtrace record --help'."
    assert error == f"modtrace: error: {said}{hint}\n"
    assert not re.search(r"[?.][.]", error.replace("...", ""))
