"""Renders the ranks of a run and the first replica that differs, as lines for a terminal or as JSON."""

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from typing import Any

from ...analysis.ranks.overview import RanksOverview, RankState
from ...analysis.ranks.replicas import Disagreement, ReplicaCheck
from ...analysis.ranks.stalls import Mismatch, Stall
from ...analysis.ranks.stragglers import Straggler
from ...analysis.ranks.waiting import RankTraffic, Waiting
from ...analysis.tables.collectives import RECV, Collective
from ...recording.phase import BACKWARD
from ...recording.protocols import LAST
from ...recording.role import BY_NAME
from ...recording.suggestions import count_of, first_few, name_ranks, ranges_of
from ..common.columns import Color, Text, render_lines
from ..common.numbers import format_bytes, format_count, format_time

#: At most this many ranks have a line of their own; of more, those that are unlike the others.
_SHOWN = 16

#: At most this many collectives to which ranks did not come have lines.
_SHOWN_STALLS = 3

#: A rank whose steps take this much longer than the fastest's is told.
_SLOWER = 1.1


def render_ranks(
    overview: RanksOverview,
    check: ReplicaCheck | None,
    waiting: Waiting,
    *,
    width: int | None = None,
    color: Color = False,
) -> str:
    """Returns which ranks did not come or disagree, which are missing or ended early, and how long their steps took.

    Args:
        overview: the ranks.
        check: the comparison of their replicas; None if there is one rank alone.
        waiting: what ranks wait for.
        width: the width of the terminal, in characters; longer lines are broken. None: no limit.
        color: whether the text is styled for a terminal, or the markup in which it is written.
    """
    lines = [
        *_describe_mismatch(waiting.mismatch),
        *(line for stall in waiting.stalls[:_SHOWN_STALLS] for line in _describe_stall(stall)),
        *_describe_straggler(waiting.straggler),
        *_describe_split(None if check is None else check.split_output),
        *_describe_check(overview, check),
        *_describe_missing(overview),
        Text(),
        *_describe_ranks(overview, {of.rank: of for of in waiting.traffic}),
    ]
    marks = [f"rank {state.rank}: {mark}" for state in overview.ranks for mark in state.marks]
    lines += [Text(f"! {mark}", "yellow") for mark in marks[:_SHOWN]]
    if len(marks) > _SHOWN:
        lines.append(Text(f"! and {len(marks) - _SHOWN} marks more: modtrace ranks --json", "yellow"))
    return render_lines(lines, color=color, width=width)


def render_ranks_json(overview: RanksOverview, check: ReplicaCheck | None, waiting: Waiting) -> str:
    """Returns the fields of all as JSON; `replicas` is null if there is one rank alone."""
    parts = {"replicas": None if check is None else asdict(check), "waiting": asdict(waiting)}
    return json.dumps(_finite({**asdict(overview), **parts}), indent=2) + "\n"


def _describe_mismatch(mismatch: Mismatch | None) -> Iterator[Text]:
    if mismatch is None:
        return
    yield Text.join(
        [
            Text("ranks call different collectives", "bold red"),
            Text(f" as number {mismatch.seq_id} of group {mismatch.group}"),
        ]
    )
    for row, ranks in zip(mismatch.calls, mismatch.ranks, strict=True):
        who = name_ranks(ranks)
        size = f", {row.dtype}, {format_bytes(row.bytes_read or 0)}" if row.dtype else ""
        yield Text(f"  {who}: {row.name}{size}: {_tell_place(row)}")


def _describe_stall(stall: Stall) -> Iterator[Text]:
    absent, came = ranges_of(stall.absent), ranges_of(stall.came)
    who, does = (f"rank {absent}", "has") if len(stall.absent) == 1 else (f"the ranks {absent}", "have")
    if stall.name == RECV:
        what = f"{does} not sent message {stall.seq_id} of group {stall.group} to rank {came}"
    else:
        what = f"{does} not come to {_name_collective(stall)} of group {stall.group}"
    yield Text.join([Text(who, "bold red"), Text(f" {what}")])
    since = f"for {format_time(stall.in_vain_ns)} when last seen"
    is_there = f"rank {came} was" if len(stall.came) == 1 else f"the ranks {came} were"
    yield Text(f"  {is_there} there {since}: {_tell_place(stall.where)}")
    for rank, last in stall.last[:_SHOWN_STALLS]:
        did = (
            "it has done nothing there" if last is None else f"{_name_collective(last)}, {_tell_place(last)}"
        )
        yield Text(f"  the last of rank {rank}: {did}")


def _name_collective(one: Stall | Collective) -> str:
    return f"{'collective' if one.name == LAST else one.name} {one.seq_id}"


def _tell_place(row: Collective) -> str:
    """Returns where in the run a collective stands: `step 7, blocks.3, forward`."""
    outside = None if row.phase == BACKWARD or row.name == LAST else "outside of modules"
    return ", ".join(part for part in (f"step {row.step}", row.path or outside, row.phase) if part)


def _describe_straggler(straggler: Straggler | None) -> Iterator[Text]:
    if straggler is None:
        return
    one = straggler
    late = f"{format_time(int(one.late_ns))} after the others"
    where = f" from {one.path}" if one.path else ""
    yield Text.join(
        [
            Text(
                f"rank {one.rank} comes last in {one.late_steps} of {count_of(one.steps, 'step')}",
                "bold yellow",
            ),
            Text(f", {late}: to {one.name}{where}"),
        ]
    )
    if one.slow_path is not None:
        yield Text(f"  its {one.slow_path} takes {format_time(int(one.slow_ns))} longer a step, forward")


def _finite(value: Any) -> Any:
    """Returns a value without NaN and infinities, which JSON lacks."""
    if isinstance(value, dict):
        return {name: _finite(part) for name, part in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(part) for part in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _describe_split(split: Disagreement | None) -> Iterator[Text]:
    if split is None:
        return
    ranks = sorted(rank for group in split.groups for rank in group)
    who = ranges_of(ranks) if len(ranks) > 2 else " and ".join(map(str, ranks))
    path = split.path or "the model"
    yield Text.join(
        [
            Text(f"the ranks {who} part", "bold red"),
            Text(f" in the output of {path}, step {split.step}: their activations were equal before it"),
        ]
    )
    yield Text(
        "  it has no parameters; if it draws numbers, as a dropout does, ranks of tensor parallelism need one seed"
    )


def _describe_check(overview: RanksOverview, check: ReplicaCheck | None) -> Iterator[Text]:
    if check is None:
        is_whole = overview.world_size == 1
        only = "the run has one rank" if is_whole else f"rank {overview.ranks[0].rank} alone is read"
        yield Text(f"{only}: there are no replicas to compare", "" if is_whole else "yellow")
    elif not check.compared and check.measured:
        yield Text("no replicas were compared: each rank has shards of its own, or a stage")
    elif not check.compared:
        yield Text(
            "no replicas were compared: parameters were not measured: record(values='stats')", "yellow"
        )
    elif not check.first:
        by = f"{format_count(check.by_hash)} by hashes" if check.by_hash else "by statistics"
        yield Text(f"the ranks agree: {format_count(check.compared)} replicated tensors, {by}")
        if check.uncompared:
            yield Text(f"  nothing was compared of rank {ranges_of(check.uncompared)}", "yellow")
    else:
        first = check.first[0]
        yield Text.join(
            [
                Text(_tell_who(first), "bold red"),
                Text(
                    f": {BY_NAME[first.role].of_one if first.role in BY_NAME else first.role} {first.name}, "
                ),
                Text(f"step {first.step}{_tell_factor(first)}"),
            ]
        )
        others = [f"{one.role} {one.name}" for one in check.first[1:]]
        if others:
            yield Text(f"  in that step {count_of(len(others), 'tensor')} more, first {first_few(others, 3)}")
        later = check.disagreeing_steps[1:]
        yield Text(f"  and in {count_of(len(later), 'later step')}" if later else "  and in no later step")
        if check.may_be_own and check.split_output is None:
            yield Text(
                "  from the first step on, and no two ranks agree: they did not begin with the same weights, or each "
                "has its own (experts, stages)"
            )
            if len(seeds := {state.seed for state in overview.ranks}) > 1 and None not in seeds:
                last = [f"{state.seed} on rank {state.rank}" for state in overview.ranks]
                yield Text(f"  the seeds that were set last: {first_few(last)}")
        if first.alone is None and len(first.groups[0]) > 1:
            alike = "; ".join(ranges_of(sorted(group)) for group in first.groups[:_SHOWN])
            yield Text(f"  the ranks with equal numbers: {alike}")


def _tell_who(first: Disagreement) -> str:
    if first.alone is not None:
        return f"rank {first.alone} alone has other numbers"
    ranks = sorted(rank for group in first.groups for rank in group)
    return f"the ranks {ranges_of(ranks) if len(ranks) > 2 else ' and '.join(map(str, ranks))} have other numbers"


def _tell_factor(first: Disagreement) -> str:
    if not math.isfinite(first.factor):
        return ""
    digits = 4 if abs(first.factor - 1) > 1e-3 else 6
    against = (
        f"rank {first.groups[1][0]}'s norm is {first.factor:.{digits}g} x that of rank {first.groups[0][0]}"
    )
    return f"; {against}" if abs(first.factor - 1) > 1e-4 else "; their norms are equal up to 0.01 %"


def _describe_missing(overview: RanksOverview) -> Iterator[Text]:
    if overview.missing:
        count = count_of(len(overview.missing), "rank")
        yield Text(f"{count} of {overview.world_size} missing: {ranges_of(overview.missing)}", "yellow")
    if overview.lacking:
        fewer = [f"{count} of rank {rank}" for rank, count in overview.lacking]
        yield Text(f"training steps that other ranks have are missing: the last {first_few(fewer)}", "yellow")
    restarted = [state for state in overview.ranks if state.attempt]
    if restarted:
        numbers = ranges_of(state.rank for state in restarted)
        yield Text(f"restarted: rank {numbers}; what ran after the last restart is read", "yellow")


def _describe_ranks(overview: RanksOverview, traffic: Mapping[int, RankTraffic]) -> Iterator[Text]:
    fastest = min((state.step_ns for state in overview.ranks if state.step_ns > 0), default=math.nan)
    shown = overview.ranks if len(overview.ranks) <= _SHOWN else _choose(overview.ranks, fastest)
    for state in shown:
        sent = _describe_traffic(traffic[state.rank]) if state.rank in traffic else ""
        yield Text(f"rank {state.rank:<4d} {_describe_state(state, fastest)}{sent}")
    if len(shown) < len(overview.ranks):
        yield Text(f"{len(overview.ranks) - len(shown)} more are like the first")


def _describe_traffic(of: RankTraffic) -> str:
    waits = "" if of.wait_ns is None else f", waits {format_time(int(of.wait_ns))}"
    return f"; collectives: {of.collectives:.3g} a step, {format_bytes(int(of.bytes_written))}{waits}"


def _choose(states: Sequence[RankState], fastest: float) -> list[RankState]:
    first = states[0]
    unlike = [
        state
        for state in states[1:]
        if (state.steps, state.last_step, state.is_closed) != (first.steps, first.last_step, first.is_closed)
        or state.step_ns > _SLOWER * fastest
    ]
    return [first, *unlike[: _SHOWN - 1]]


def _describe_state(state: RankState, fastest: float) -> str:
    steps = count_of(state.steps, "step")
    if state.last_step is not None:
        steps += f" to {state.last_step}"
    time = f", {format_time(int(state.step_ns))} a step" if state.step_ns > 0 else ""
    slower = f", {state.step_ns / fastest:.2f} x the fastest" if state.step_ns > _SLOWER * fastest else ""
    return f"{steps}{time}{slower}{'' if state.is_closed else ', not closed'}"
