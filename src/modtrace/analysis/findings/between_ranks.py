"""Finds what is wrong between the ranks of a run: replicas that differ, ranks that hang, ranks that are late."""

from collections.abc import Callable, Iterator, Mapping, Sequence

from ...recording.protocols import RecordingData
from ...recording.suggestions import count_of, ranges_of
from ..ranks.overview import read_overview
from ..ranks.replicas import Disagreement, check_replicas
from ..ranks.waiting import Waiting, read_waiting
from .finding import CannotCheck, Finding

#: The ranks of a run with their recordings, ascending, and the ranks that are missing.
Ranks = tuple[Sequence[tuple[int, RecordingData]], tuple[int, ...]]

_MORE = "modtrace ranks RUN tells more"


def find_unlike_replicas(ranks: Ranks) -> Iterator[Finding]:
    """Finds parameters, gradients and optimizer states that should be equal on several ranks."""
    check = check_replicas(ranks[0])
    if not check.compared:
        raise CannotCheck("no two ranks have a replica that was measured")
    if check.split_output is not None:
        yield _describe(check.split_output, "give the ranks of tensor parallelism one seed for dropout")
    if check.first:
        remedy = "were the weights broadcast, and does each step reduce this gradient on all ranks? " + _MORE
        finding = _describe(check.first[0], remedy)
        if check.may_be_own:
            own = (
                "from the first step on: they began with other weights, or each has its own (experts, stages)"
            )
            yield Finding(**{**vars(finding), "severity": "warning", "evidence": (own,)})
        else:
            yield finding


def _describe(first: Disagreement, remedy: str) -> Finding:
    return Finding(
        severity="error",
        text=str(first),
        remedy=remedy,
        path=first.path,
        parameter=first.slot,
        step=first.step,
        rank=first.alone,
    )


def _read_waiting(ranks: Ranks) -> Waiting:
    waiting = read_waiting(ranks[0], read_overview(*ranks))
    if not waiting.traffic:
        raise CannotCheck("the ranks were not seen to call collectives")
    return waiting


def find_hangs(ranks: Ranks) -> Iterator[Finding]:
    """Finds ranks that did not come to a collective, and ranks that called different ones."""
    waiting = _read_waiting(ranks)
    for stall in waiting.stalls:
        who = "rank" if len(stall.absent) == 1 else "the ranks"
        came, where = ranges_of(stall.came), stall.where
        yield Finding(
            severity="error",
            text=f"{who} {ranges_of(stall.absent)} did not come to {stall.name} {stall.seq_id} of {stall.group}",
            remedy=f"look where that rank was: {_MORE}",
            evidence=(
                f"the ranks {came} were there, from {where.path or 'outside of modules'}, step {where.step}",
            ),
            path=where.path,
            step=where.step,
            rank=stall.absent[0],
        )
    if waiting.mismatch is not None:
        one = waiting.mismatch
        calls = " and ".join(f"{call.name} ({call.bytes_read or 0:,} bytes)" for call in one.calls[:2])
        yield Finding(
            severity="error",
            text=f"ranks call different collectives as number {one.seq_id} of {one.group}: {calls}",
            remedy=f"the order and the sizes must be equal on all ranks: {_MORE}",
            path=one.calls[0].path,
            step=one.calls[0].step,
        )


def find_late_ranks(ranks: Ranks) -> Iterator[Finding]:
    """Finds the rank for which the others wait in most steps."""
    straggler = _read_waiting(ranks).straggler
    if straggler is None:
        return
    one = straggler
    late = f"{one.late_ns / 1e6:.3g} ms after the others"
    slow = f"its {one.slow_path} takes {one.slow_ns / 1e6:.3g} ms longer a step, forward"
    yield Finding(
        severity="warning",
        text=f"rank {one.rank} comes last in {one.late_steps} of {count_of(one.steps, 'step')}, {late}",
        remedy=f"look at its machine, and at the sizes of its batches: {_MORE}",
        evidence=() if one.slow_path is None else (slow,),
        path=one.slow_path or one.path,
        rank=one.rank,
    )


#: The checks that need several ranks.
RANK_CHECKS: Mapping[str, Callable[[Ranks], Iterator[Finding]]] = {
    "replicas": find_unlike_replicas,
    "hang": find_hangs,
    "straggler": find_late_ranks,
}
