"""Checks of users read rows, are found by name, and take no other check along when they fail."""

import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import pytest
import torch
from torch import nn

import modtrace
from helpers.command_line import Command
from helpers.growth import count_lines
from helpers.health_models import FAMILIES, Stack, train
from modtrace.analysis.findings.all_checks import CHECKS
from modtrace.analysis.findings.check import run_checks
from modtrace.store.reader import FolderReader


@pytest.fixture(scope="module")
def recording() -> modtrace.Recording:
    return train(Stack(FAMILIES["attention"]))


def test_rows_are_data_frames(recording: modtrace.Recording) -> None:
    @modtrace.check("large", about="large outputs", needs="values")
    def large(run, limit=0.0) -> Iterator[modtrace.Finding]:
        outputs = run.values("output").to_pandas()
        calls, steps = run.rows("calls").to_pandas(), run.steps.to_pandas()
        assert len(calls) and len(steps) == 5
        of_head = outputs[(outputs.path == "head") & (outputs.role == "output") & (outputs.call == 0)]
        assert [*of_head.step] == run.numbers.tolist()
        if of_head["max"].max() > limit:
            yield modtrace.Finding(severity="note", text="it is large", remedy="look at it")

    found = recording.findings(only=["large"], also=[large])
    assert [one.check for one in found.findings] == ["large"]
    assert not recording.findings(only=["large"], also=[large], thresholds={"large.limit": 1e9}).findings


def test_check_that_raises_is_not_checked_and_the_others_run(recording: modtrace.Recording) -> None:
    @modtrace.check("broken", about="nothing")
    def broken(run):
        yield modtrace.Finding(severity="error", text="a finding before it", remedy="none")
        raise ValueError("no such column.")

    found = recording.findings(also=[broken])
    [one] = [one for one in found.unchecked if one.check == "broken"]
    assert one.why.startswith("it raised ValueError: no such column, at test_check.py:")
    assert not one.remedy
    assert not found.findings and found.checked == recording.findings().checked
    assert "not checked: broken: it raised ValueError: " in str(found)


PAGE = Path(__file__).parents[3] / "docs" / "check.md"


def test_page_lists_all_checks_and_all_thresholds_with_their_defaults() -> None:
    text = PAGE.read_text()
    listed = dict(re.findall(r"^\| `([\w-]+\.\w+)` \| ([\d.e+-]+) \|", text, re.MULTILINE))
    known = {f"{one.name}.{name}": value for one in CHECKS for name, value in one.thresholds.items()}
    assert {name: float(value) for name, value in listed.items()} == pytest.approx(known, rel=1e-3)
    assert {one.name for one in CHECKS} <= {*re.findall(r"^\| `([\w-]+)` \|", text, re.MULTILINE)}
    for name in re.findall(r"`--threshold ([a-z][\w.-]+)=", text + (PAGE.parent / "messages.md").read_text()):
        assert name in known


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--threshold", "loss-spike.x=1"], "--threshold*There are: loss-spike.factor, loss-spike.rise"),
        (["--threshold", "x.y=1"], "--threshold*docs/check.md lists all."),
        (["--threshold", "loss-spike.factor"], "--threshold*give CHECK.NAME=NUMBER"),
        (["--only", "loss-spik"], "--only*Did you mean 'loss-spike'?"),
        (["--ignore", "nosuch"], "--ignore*There are: failed, out-of-memory, "),
    ],
)
def test_wrong_names_are_refused_with_those_that_are_near(
    recording: modtrace.Recording, tmp_path: Path, arguments: list[str], said: str, command: Command
) -> None:
    recording.write(tmp_path / "run")
    done = command("check", str(tmp_path / "run"), *arguments, code=2)
    option, text = said.split("*")
    assert f"Invalid value for {option}: " in done.err
    assert text in done.err


def test_checks_of_twice_the_modules_read_no_table_more_often(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A reader of files asks each time whether they are the same."""
    asked = list[str]()
    read = FolderReader.table
    monkeypatch.setattr(FolderReader, "table", lambda self, name: (asked.append(name), read(self, name))[1])

    def reads(count: int) -> int:
        model = nn.Sequential(*[nn.Linear(2, 2) for _ in range(count)])
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
        with modtrace.record(model, to=tmp_path / f"{count}", strict=True):
            for _ in range(3):
                model(torch.ones(1, 2)).sum().backward()
                optimizer.step()
                optimizer.zero_grad()
        data = modtrace.open_recording(tmp_path / f"{count}").data
        asked.clear()
        run_checks(data, CHECKS)
        return len(asked)

    assert reads(32) == reads(16)


def test_whole_threshold_stays_a_whole_number(command: Command, tmp_path: Path) -> None:
    train(Stack(FAMILIES["attention"]), to=tmp_path / "run.modtrace")
    said = command(
        "check",
        str(tmp_path / "run.modtrace"),
        "--threshold",
        "dead-units.steps=20",
        "--only",
        "dead-units",
        code=2,
    )
    assert "it takes 20 comparable training steps" in said.out


@pytest.mark.parametrize("answer", ["checks", "tree", "report"])
def test_answers_on_twice_the_modules_take_at_most_twice_the_lines(answer: str, tmp_path: Path) -> None:
    """Even of blocks that hold lists, as experts are, each beside modules of their block."""

    def lines(count: int) -> int:
        lists = (nn.Sequential(*[nn.Linear(2, 2) for _ in range(3)]) for _ in range(count))
        model = nn.Sequential(*[nn.Sequential(nn.Linear(2, 2), experts) for experts in lists])
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
        with modtrace.record(model, strict=True) as recording:
            for _ in range(2):
                model(torch.ones(1, 2)).sum().backward()
                optimizer.step()
        asked: Mapping[str, Callable[[], object]] = {
            "checks": lambda: run_checks(recording.data, CHECKS),
            "tree": lambda: str(recording),
            "report": lambda: recording.write_html(tmp_path / f"{count}.html"),
        }
        return count_lines(asked[answer])

    lines(2)  # imports and caches
    assert lines(64) < 2 * lines(32)


def test_checks_of_twice_the_modules_run_at_most_about_twice_the_lines() -> None:
    """Gradients followed over the depth row by row took 1,870 lines for a layer and an activation."""

    def lines(count: int) -> int:
        blocks = [nn.Sequential(nn.Linear(2, 2), nn.ReLU()) for _ in range(count)]
        model = nn.Sequential(*blocks)
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
        with modtrace.record(model, strict=True) as recording:
            for _ in range(3):
                optimizer.zero_grad()
                model(torch.ones(1, 2)).sum().backward()
                optimizer.step()
        return count_lines(lambda: run_checks(recording, CHECKS))

    lines(10)  # imports and caches
    few, many = lines(100), lines(200)
    assert many < 2.2 * few
    assert (many - few) / 100 < 1_200
