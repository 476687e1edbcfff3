"""Ranks are checked against each other, and what several ranks have is told once."""

from collections.abc import Iterator, Sequence

import pytest

from builders import RecordingBuilder, TypedRecording
from modtrace.analysis.divergence.compare import compare_recordings
from modtrace.analysis.findings.all_checks import CHECKS
from modtrace.analysis.findings.check import check
from modtrace.analysis.findings.finding import Finding, Findings
from modtrace.analysis.findings.of_ranks import check_ranks
from modtrace.analysis.tables.ranks import RanksData
from modtrace.analysis.tables.sampled_steps import SampledSteps
from modtrace.recording.suggestions import ranges_of


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


def test_comparison_says_that_the_ranks_of_a_run_have_parted() -> None:
    """Of replicas only those of the lowest rank are compared, which are equal here."""
    alike, parted = (RanksData([_rank(0), _rank(1, weight=weight), _rank(2)]) for weight in (1.0, 3.0))
    text = "rank 1 alone has other numbers in parameter head.weight, step 1; modtrace ranks tells more"
    one = _rank(0, world=1)[1]
    assert compare_recordings(one, alike).marks == ()
    assert compare_recordings(one, parted).marks == (f"second: {text}",)
    assert compare_recordings(parted, one).marks == (f"first: {text}",)


def test_what_one_rank_has_names_it_and_what_all_have_stands_once() -> None:
    nan = float("nan")
    [found] = _check(_rank(0), _rank(1), _rank(2, output=nan)).findings
    assert found.text.endswith("in step 1 (on rank 2 of 3)")
    [found] = _check(*(_rank(rank, output=nan) for rank in range(3))).findings
    assert found.rank is None
    assert "(on" not in found.text


@pytest.mark.parametrize("faulty", [0, 1, 3])
def test_rank_that_was_given_a_nan_by_the_others_is_not_accused(faulty: int) -> None:
    """Its gradient is reduced with that of the rank whose output was not finite first."""
    nan, ranks = float("nan"), []
    for rank in range(4):
        build = RecordingBuilder(rank=rank, world_size=4, complete=True)
        net = build.module("", "Net")
        head = build.module("head", "Linear", parent=net)
        build.step(0, 0, 500)
        call = build.call(head, 0, 100, parent=build.call(net, 0, 200))
        build.output(call, [nan if rank == faulty else 1.0, 2.0])
        build.parameter_grad(head, "weight", [nan, 2.0])
        ranks.append((rank, build.data()))
    [found] = _check(*ranks, only=["nonfinite"]).findings
    others = ranges_of(rank for rank in range(4) if rank != faulty)
    assert (found.rank, found.path) == (faulty, "head")
    assert found.text.startswith("the output of head ")
    assert found.text.endswith(f"in step 0 (on rank {faulty} of 4)")
    assert found.evidence[-1] == f"the ranks {others} had such values later, and may have been given them"


@check("places", about="a place of all ranks, and one of rank 2", needs="values")
def _PLACES(run: SampledSteps) -> Iterator[Finding]:
    for path in ("all", "own") if run.data.meta.rank == 2 else ("all",):
        yield Finding(severity="warning", text=path, remedy="", path=path)


def test_what_one_rank_has_alone_comes_before_what_all_have() -> None:
    found = check_ranks([_rank(rank) for rank in range(3)], (), [_PLACES], only=["places"]).findings
    assert [(finding.path, finding.rank) for finding in found] == [("own", 2), ("all", None)]


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
