"""What cannot be checked says why, and what to record for it: the check then runs, and no other is lost."""

import re
from typing import Any

import pytest
import torch
from torch import nn

import modtrace
from helpers.health_models import FAMILIES, Stack, train
from modtrace.analysis.findings.finding import Findings
from modtrace.cli.record import record as record_command
from modtrace.recording.options.capture import Capture
from modtrace.recording.options.capture_text import parse_capture

EVERYTHING: dict[str, Any] = {
    "ops": True,
    "backward_times": True,
    "values": ["stats", Capture(roles=["update", "parameter"])],
}


def _follow(remedy: str, options: dict[str, Any]) -> list[dict[str, Any]]:
    """Returns the options of `record()` with each of the arguments that a remedy names."""
    found = []
    for argument in re.findall(r"\((\w+=.*?)\)(?= or |$)", remedy):
        name, _, value = argument.partition("=")
        given = eval(value, {"modtrace": modtrace})
        if isinstance(given, list):
            before = options.get("values", "stats")
            others = before if isinstance(before, list) else [before]
            given = [one for part in given for one in (others if part is ... else [part])]
        found.append({**options, name: given})
    return found


def _find(options: dict[str, Any]) -> Findings:
    """Returns the findings of a training that is recorded with some options, which trains once for all tests."""
    known = repr(sorted(options.items()))
    if known not in _FOUND:
        torch.manual_seed(0)
        _FOUND[known] = train(Stack(FAMILIES["attention"]), steps=12, **options).findings()
    return _FOUND[known]


_FOUND: dict[str, Findings] = {}


@pytest.mark.parametrize(
    "options", [{}, {"values": None}, {"ops": True}, {"values": [Capture(roles=["update", "parameter"])]}]
)
def test_followed_remedies_let_the_check_run_and_lose_no_other(options: dict[str, Any]) -> None:
    before = _find(options)
    remedies = {one.remedy: [] for one in before.unchecked}
    for one in before.unchecked:
        remedies[one.remedy].append(one.check)
    assert "" not in remedies
    for remedy, names in remedies.items():
        ways = _follow(remedy, options)
        assert ways, remedy
        for way in ways:
            checked = _find(way).checked
            assert {*before.checked, *names} <= {*checked}, remedy


def test_remedies_name_options_that_the_command_has() -> None:
    unchecked = [
        one for values in (None, [Capture(hash=True)]) for one in _find({"values": values}).unchecked
    ]
    assert len({one.remedy for one in unchecked}) > 3
    known = {option for parameter in record_command.params for option in parameter.opts}
    for one in unchecked:
        assert one.remedy.startswith("record --")
        assert {*re.findall(r"--[\w-]+", one.remedy)} <= known
        for text in re.findall(r"--capture (\S+)", one.remedy):
            parse_capture(text)


def _fail(at: int) -> modtrace.Recording:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(RuntimeError), modtrace.record(model, strict=True, **EVERYTHING) as rec:
        for step in range(at + 1):
            model(torch.randn(2, 5 if step == at else 4)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    return rec


@pytest.mark.parametrize("at", [0, 1, 3])
def test_what_is_recorded_already_is_no_remedy(at: int) -> None:
    found = _fail(at).findings()
    assert [one.remedy for one in found.unchecked if one.remedy] == []
    assert not [one.text for one in found.findings if re.search("record --|ops=True", one.remedy)]
    for one in found.unchecked:
        assert "were recorded" not in one.why


def test_evaluation_alone_is_no_lack_of_options() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU())
    with modtrace.record(model, strict=True, **EVERYTHING) as rec, torch.no_grad():
        for _ in range(8):
            model(torch.randn(2, 4))
    assert {one.remedy for one in rec.findings().unchecked} == {""}
    assert "no training step has ended" in {one.why for one in rec.findings().unchecked}


def test_lost_tables_are_named_as_such(tmp_path: Any) -> None:
    recording = tmp_path / "run.modtrace"
    train(Stack(FAMILIES["attention"]), steps=6, to=recording)
    values = next(recording.rglob("values.arrow"))
    values.write_bytes(values.read_bytes()[:200])
    unchecked = modtrace.open_recording(recording).findings().unchecked
    whole = [one for one in unchecked if "not whole" in one.why]
    assert {"dead-units", "loss-spike", "massive-activations"} <= {one.check for one in whole}
    assert {one.remedy for one in whole} == {""}
