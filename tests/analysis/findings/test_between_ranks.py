"""Ranks are checked against each other, and what several ranks have is told once."""

from collections.abc import Sequence

import pytest

from builders import RecordingBuilder, TypedRecording
from modtrace.analysis.findings.all_checks import CHECKS
from modtrace.analysis.findings.finding import Findings
from modtrace.analysis.findings.of_ranks import check_ranks


def _rank(
    rank: int, *, weight: float = 1.0, output: float = 1.0, world: int = 3
) -> tuple[int, TypedRecording]:
    build = RecordingBuilder(rank=rank, world_size=world, complete=True)
    net = build.module("", "Net")
    head = build.module("head", "Linear", parent=net)
    for step in range(2):
        build.step(step, 1_000 * step, 1_000 * step + 500)
        call = build.call(
            head, 1_000 * step, 1_000 * step + 100, parent=build.call(net, 1_000 * step, 1_000 * step + 200)
        )
        build.output(call, [output if step else 1.0, 2.0])
        build.parameter(head, "weight", [weight if step else 1.0, 2.0])
    return rank, build.data()


def _check(*ranks: tuple[int, TypedRecording], only: Sequence[str] = ()) -> Findings:
    return check_ranks(ranks, (), CHECKS, only=only)


def test_replica_that_differs_is_an_error_with_its_rank() -> None:
    [found] = _check(_rank(0), _rank(1, weight=3.0), _rank(2)).findings
    assert (found.check, found.severity, found.rank, found.step) == ("replicas", "error", 1, 1)
    assert found.text == "rank 1 alone has other numbers in parameter head.weight, step 1"


def test_what_one_rank_has_names_it_and_what_all_have_stands_once() -> None:
    nan = float("nan")
    [found] = _check(_rank(0), _rank(1), _rank(2, output=nan)).findings
    assert found.text.endswith("in step 1 (on rank 2 of 3)")
    [found] = _check(*(_rank(rank, output=nan) for rank in range(3))).findings
    assert found.rank is None
    assert "(on" not in found.text


def test_equal_ranks_have_no_finding_and_what_was_not_seen_is_not_checked() -> None:
    found = _check(_rank(0), _rank(1), _rank(2))
    assert not found.findings
    assert "replicas" in found.checked
    assert {"hang", "straggler"} <= {one.check for one in found.unchecked}


def test_one_rank_is_not_checked_against_others() -> None:
    assert "replicas" not in _check(_rank(0, world=1)).checked


def test_checks_between_ranks_are_chosen_by_name() -> None:
    assert _check(_rank(0), _rank(1, weight=3.0), only=["replicas"]).checked == ("replicas",)
    with pytest.raises(ValueError, match=r"no check of this name\. Did you mean .replicas."):
        _check(_rank(0), _rank(1), only=["replica"])
