"""Which rank did not come, and for which the others wait: on rows that were typed by hand."""

import random
from collections.abc import Iterable, Mapping
from math import comb

import pytest

from builders import RecordingBuilder
from modtrace.analysis.ranks.overview import read_overview
from modtrace.analysis.ranks.stragglers import _chance
from modtrace.analysis.ranks.waiting import Waiting, read_waiting
from modtrace.recording.protocols import UNKNOWN, RecordingData
from modtrace.views.text.ranks import render_ranks

S, MS = 1_000_000_000, 1_000_000
Rows = Iterable[tuple[str, int, int, Mapping[str, object]]]


def rank_with(
    rank: int, rows: Rows, *, world: int = 2, steps: int = 3, **meta: object
) -> tuple[int, RecordingData]:
    """A rank with these collectives: name, number, start, more columns."""
    build = RecordingBuilder(rank=rank, world_size=world, **meta)
    for step in range(steps):
        build.step(step, step * 100 * MS, step * 100 * MS + 90 * MS)
    for name, number, start_ns, more in rows:
        build.begin_step(int(more.get("step", 0)))  # type: ignore[call-overload]
        build.collective(name, number, start_ns, **{"ranks": f"0-{world - 1}", **more})
    return rank, build.data()


def read(*ranks: tuple[int, RecordingData]) -> Waiting:
    return read_waiting(ranks, read_overview(ranks))


def reduces(numbers: Iterable[int], **more: object) -> list[tuple[str, int, int, Mapping[str, object]]]:
    return [("all_reduce", number, number * 10 * MS, more) for number in numbers]


def seen(number: int, at_ns: int) -> list[tuple[str, int, int, Mapping[str, object]]]:
    return [(UNKNOWN, number, at_ns, {})]


def told(*ranks: tuple[int, RecordingData]) -> list[str]:
    overview = read_overview(ranks)
    return render_ranks(overview, None, read_waiting(ranks, overview)).splitlines()


def test_rank_that_did_not_come_is_named_by_who_waits_and_what_it_did_last() -> None:
    waiting = rank_with(0, [*reduces(range(1, 5), path="blocks.3", phase="forward", step=2), *seen(4, 9 * S)])
    absent = rank_with(1, [*reduces(range(1, 4), path="blocks.2", phase="forward", step=2), *seen(3, 9 * S)])
    assert told(waiting, absent)[:3] == [
        "rank 1 has not come to all_reduce 4 of group world",
        "  rank 0 waits for it: step 2, blocks.3, forward",
        "  the last of rank 1: all_reduce 3, step 2, blocks.2, forward",
    ]


def test_several_of_four_ranks_are_absent() -> None:
    ranks = [
        rank_with(rank, [*reduces(range(1, 3 + rank % 2)), *seen(2 + rank % 2, 9 * S)], world=4)
        for rank in range(4)
    ]
    [stall] = read(*ranks).stalls
    assert (stall.absent, stall.came, stall.seq_id) == ((0, 2), (1, 3), 3)


def test_rank_that_was_killed_before_its_first_collective_is_absent() -> None:
    [stall] = read(rank_with(0, [*reduces([1]), *seen(1, 9 * S)]), rank_with(1, ())).stalls
    assert (stall.absent, stall.last) == ((1,), ((1, None),))


@pytest.mark.parametrize("behind_s", [0.0, 0.4, 0.9])
def test_healthy_ranks_that_are_killed_or_still_run_accuse_nobody(behind_s: float) -> None:
    """Each looks at its numbers at another moment, so these differ."""
    ahead = rank_with(0, [*reduces(range(1, 9)), *seen(20, int(80 * MS + behind_s * S))])
    assert read(ahead, rank_with(1, [*reduces(range(1, 8)), *seen(7, 75 * MS)])).stalls == ()


def test_number_alone_shows_that_a_rank_came() -> None:
    """What C++ code starts is known by its number where torch's log was not read."""
    waiting = rank_with(0, [*reduces(range(1, 5)), *seen(4, 9 * S)])
    assert read(waiting, rank_with(1, [*reduces(range(1, 3)), *seen(4, 9 * S)])).stalls == ()


def test_closed_ranks_that_ended_at_different_places_accuse_nobody() -> None:
    assert read(rank_with(0, reduces(range(5)), complete=True), rank_with(1, reduces(range(3)))).stalls == ()


def test_rank_whose_wait_ended_by_an_exception_names_the_absent_one() -> None:
    failed = rank_with(0, reduces(range(1, 4)), marks=("the run ended by RuntimeError: timed out",))
    [stall] = read(failed, rank_with(1, reduces(range(1, 3)))).stalls
    assert (stall.absent, stall.seq_id) == ((1,), 3)


def test_message_that_was_not_sent_names_the_sender() -> None:
    waits = rank_with(1, [("recv", 3, 0, {"peer": 0, "path": "stage", "phase": "forward"}), *seen(0, 9 * S)])
    sender = rank_with(0, [("send", number, number, {"peer": 1, "step": 1}) for number in (1, 2)])
    assert told(sender, waits)[:3] == [
        "rank 0 has not sent message 3 to rank 1",
        "  rank 1 waits for it: step 0, stage, forward",
        "  the last of rank 0: send 2, step 1, outside of modules",
    ]


def late_ranks(
    late_ms: float, *, world: int = 4, steps: int = 50, offset_ns: int = 0, seed: int = 0
) -> list[tuple[int, RecordingData]]:
    """Ranks of which the last comes later to the second of three collectives a step, on a clock of its own."""
    noise = random.Random(seed)
    rows: list[list[tuple[str, int, int, Mapping[str, object]]]] = [[] for _ in range(world)]
    now = 0.0
    for step in range(steps):
        for at in range(3):
            came = [
                now + 5 + noise.random() + late_ms * (at == 1 and rank == world - 1) for rank in range(world)
            ]
            now = max(came)
            for rank in range(world):
                own_ns = offset_ns if rank == world - 1 else 0
                more = {"path": f"blocks.{at}", "step": step, "end_ns": int(now * MS) + own_ns}
                rows[rank].append(("all_gather", 3 * step + at + 1, int(came[rank] * MS) + own_ns, more))
    return [rank_with(rank, rows[rank], world=world, steps=steps) for rank in range(world)]


@pytest.mark.parametrize("offset_ns", [0, 5 * S, -7 * S])
def test_straggler_is_found_whatever_its_clock_says(offset_ns: int) -> None:
    found = read(*late_ranks(18, offset_ns=offset_ns)).straggler
    assert found is not None
    assert (found.rank, found.late_steps, found.steps) == (3, 50, 50)
    assert (found.name, found.path) == ("all_gather", "blocks.1")
    assert found.late_ns == pytest.approx(18 * MS, rel=0.1)


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize("world", [2, 4])
def test_nobody_is_a_straggler_by_chance(world: int, seed: int) -> None:
    assert read(*late_ranks(0, world=world, steps=12, seed=seed)).straggler is None


@pytest.mark.parametrize(("count", "steps", "part"), [(3, 4, 0.5), (41, 50, 0.25), (12, 12, 1 / 3)])
def test_chance_is_that_of_the_binomial_distribution(count: int, steps: int, part: float) -> None:
    wanted = sum(
        comb(steps, hits) * part**hits * (1 - part) ** (steps - hits) for hits in range(count, steps + 1)
    )
    assert _chance(count, steps, part) == pytest.approx(wanted)
    assert _chance(20_000, 30_000, 0.5) < 1e-100


def test_too_few_steps_prove_nothing() -> None:
    assert read(*late_ranks(18, world=2, steps=5)).straggler is None
