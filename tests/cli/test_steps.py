"""`--step` of every command that has it: a number, one from the end, or a word."""

import json
from pathlib import Path

import click
import pytest

from builders import RecordingBuilder
from helpers.command_line import Command, run_command
from modtrace.analysis.tables.chosen_step import STEP_NAMES, find_step
from modtrace.cli.open_run import AskedStep
from modtrace.cli.output import TRAINING_COUNTS, print_view
from modtrace.store.copy import write_recording
from modtrace.views.common.columns import Text, render_lines

#: Steps 3 to 7; the end of the last was not recorded.
KINDS = {3: "eval", 4: "train", 5: "train", 6: "eval", 7: None}


def recording(kinds: dict[int, str | None] = KINDS) -> RecordingBuilder:
    build = RecordingBuilder(complete=True, options={"ops": {}, "values": "stats"})
    net = build.module("", "Net")
    for step, kind in kinds.items():
        if kind is None:
            build.begin_step(step)
        else:
            build.step(step, step * 1000, step * 1000 + 900, kind=kind)
        call = build.call(net, step * 1000, step * 1000 + 500)
        build.op(call, "aten.relu.default", step * 1000 + 10, step * 1000 + 20)
        build.output(call, [1.0, 2.0], histogram=[0] * 127 + [2] + [0] * 128, zero_count=0)
    return build


@pytest.mark.parametrize(
    ("asked", "step"),
    [
        (None, None),
        (4, 4),
        (99, 99),  # whoever shows it says that there is none
        (-1, 7),
        (-5, 3),
        ("first", 3),
        ("last", 7),
        ("first-train", 4),
        ("last-train", 5),
        ("first-eval", 3),
        ("last-eval", 6),
    ],
)
def test_step_is_found_by_number_from_the_end_or_by_word(asked: AskedStep, step: int | None) -> None:
    assert find_step(recording().data(), asked) == step


def test_every_word_is_tested() -> None:
    assert len(STEP_NAMES) == 6


@pytest.mark.parametrize(
    ("kinds", "asked", "text"),
    [
        (KINDS, -6, "no step -6 in this recording; there are: 3..7"),
        (
            {3: "eval", 4: "eval"},
            "last-train",
            "no step 'last-train' in this recording; there are: 3..4 (eval)",
        ),
        ({}, "last", "no step 'last' in this recording; there are: none"),
    ],
)
def test_step_that_is_not_there_names_those_that_are(
    kinds: dict[int, str | None], asked: AskedStep, text: str
) -> None:
    with pytest.raises(ValueError) as raised:
        find_step(recording(kinds).data(), asked)
    assert str(raised.value) == text


@pytest.mark.parametrize(
    ("command", "field"),
    [
        (["show"], "step"),
        (["ops"], "step"),
        (["memory"], "step"),
        (["paths"], "step"),
        (["graph"], "step"),
        (["timeline", "-o", "a.json"], "steps"),
        (["plot", "--kind", "histogram"], "steps"),
        (["export", "-o", "a.dot"], ""),
    ],
)
def test_every_command_with_a_step_takes_words(
    command: list[str],
    field: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    write_recording(recording().data(), tmp_path / "run.modtrace")
    monkeypatch.chdir(tmp_path)
    name, *more = command
    for asked, step in (("first-train", 4), ("-2", 6)):
        assert run_command(monkeypatch, name, "run.modtrace", *more, "--step", asked, "--json") == 0
        found = json.loads(capsys.readouterr().out)
        if field:
            shown = found[field]
            assert shown in (step, [step]) or shown["step"] == step
    assert run_command(monkeypatch, name, "run.modtrace", *more, "--step", "last-tran", "--json") == 2
    assert capsys.readouterr().err.startswith(
        "modtrace: error: Invalid value for '--step': 'last-tran' is no step: give a number, -1 for the last, or "
        "first, last, first-train, last-train, first-eval, last-eval. Did you mean 'last-train'?"
    )
    assert run_command(monkeypatch, name, "--help") == 0
    assert "last-train" in capsys.readouterr().out


def test_answer_says_which_step_of_training_it_names_where_evaluations_are_steps_too(
    command: Command, tmp_path: Path
) -> None:
    kinds: dict[int, str | None] = {0: "train", 1: "eval", 2: "train", 3: "train"}
    for name, of_steps in (("both", kinds), ("without", dict.fromkeys(kinds, "train")), ("later", KINDS)):
        write_recording(recording(of_steps).data(), tmp_path / name)
    shown = {
        (name, step): command("show", str(tmp_path / name), "--step", step).out.splitlines()[-1]
        for name, step in (("both", "3"), ("both", "0"), ("without", "3"), ("later", "5"))
    }
    assert shown.pop(("both", "3")) == "steps count evaluations: step 3 is the 3rd of training"
    assert not any("of training" in line for line in shown.values())
    named = command("ops", str(tmp_path / "both"), "--step", "2").out
    assert named.endswith("steps count evaluations: step 2 is the 2nd of training\n")
    assert "of training" not in command("ops", str(tmp_path / "both"), "--step", "2", "--json").out


def test_styles_between_words_and_breaks_of_lines_hide_no_step(capsys: pytest.CaptureFixture[str]) -> None:
    with click.Context(click.Command("show")) as context:
        context.meta[TRAINING_COUNTS] = lambda: {3: 2, 5: 4}
        styled = render_lines([Text("step 3", "bold")], color=True, width=None)
        print_view(lambda **_: f"{styled}step\n5\n")
    told = capsys.readouterr().out.splitlines()[-1]
    assert told == "steps count evaluations: step 3 is the 2nd of training, step 5 is the 4th of training"
