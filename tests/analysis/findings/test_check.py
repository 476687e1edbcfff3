"""Checks of users read rows, are found by name, and take no other check along when they fail."""

from collections.abc import Iterator

import pytest

import modtrace
from helpers.health_models import FAMILIES, Stack, train


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
