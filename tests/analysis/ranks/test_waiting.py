"""Which rank did not come, and for which the others wait: on rows that were typed by hand."""

import random
from collections.abc import Iterable, Mapping
from math import comb

import pytest

from builders import RecordingBuilder
from modtrace.analysis.ranks.overview import read_overview
from modtrace.analysis.ranks.stragglers import _chance
from modtrace.analysis.ranks.waiting import Waiting, read_waiting
from modtrace.recording.protocols import LAST, RecordingData
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


def seen(number: int, at_ns: int, *, since_ns: int = 0) -> list[tuple[str, int, int, Mapping[str, object]]]:
    """The number of the last collective, and when a rank was last seen to live."""
    return [(LAST, number, since_ns, {"end_ns": at_ns})]


def told(*ranks: tuple[int, RecordingData]) -> list[str]:
    overview = read_overview(ranks)
    return render_ranks(overview, None, read_waiting(ranks, overview)).splitlines()


def test_rank_that_did_not_come_is_named_by_who_waits_and_what_it_did_last() -> None:
    waiting = rank_with(0, [*reduces(range(1, 5), path="blocks.3", phase="forward", step=2), *seen(4, 9 * S)])
    absent = rank_with(1, [*reduces(range(1, 4), path="blocks.2", phase="forward", step=2), *seen(3, 9 * S)])
    assert told(waiting, absent)[:3] == [
        "rank 1 has not come to all_reduce 4 of group world",
        "  rank 0 was there for 8.96s when last seen: step 2, blocks.3, forward",
        "  the last of rank 1: all_reduce 3, step 2, blocks.2, forward",
    ]


def test_several_of_four_ranks_are_absent() -> None:
    ranks = [
        rank_with(rank, [*reduces(range(1, 3 + rank % 2)), *seen(2 + rank % 2, 9 * S)], world=4)
        for rank in range(4)
    ]
    [stall] = read(*ranks).stalls
    assert (stall.absent, stall.came, stall.seq_id) == ((0, 2), (1, 3), 3)


def test_rank_that_has_not_begun_is_absent_and_one_of_which_nothing_is_known_is_not() -> None:
    waiting = rank_with(0, [*reduces([1]), *seen(1, 9 * S)])
    [stall] = read(waiting, rank_with(1, seen(0, 9 * S))).stalls
    assert (stall.absent, stall.last) == ((1,), ((1, None),))
    assert read(waiting, rank_with(1, ())).stalls == ()


@pytest.mark.parametrize("behind_s", [0.0, 0.4, 0.9])
def test_healthy_ranks_that_are_killed_or_still_run_accuse_nobody(behind_s: float) -> None:
    """Each looks at its numbers at another moment, so these differ."""
    ahead = rank_with(0, [*reduces(range(1, 9)), *seen(20, int(80 * MS + behind_s * S))])
    assert read(ahead, rank_with(1, [*reduces(range(1, 8)), *seen(7, 75 * MS)])).stalls == ()


def test_number_alone_shows_that_a_rank_came() -> None:
    """What C++ code starts is known by its number where torch's log was not read."""
    waiting = rank_with(0, [*reduces(range(1, 5)), *seen(4, 9 * S)])
    assert read(waiting, rank_with(1, [*reduces(range(1, 3)), *seen(4, 9 * S)])).stalls == ()


def test_numbers_alone_name_the_rank_that_did_not_come() -> None:
    ranks = rank_with(0, seen(20, 9 * S, since_ns=2 * S)), rank_with(1, seen(12, 9 * S, since_ns=1 * S))
    assert told(*ranks)[:3] == [
        "rank 1 has not come to collective 13 of group world",
        "  rank 0 was there for 7.00s when last seen: step 0",
        "  the last of rank 1: collective 12, step 0",
    ]


def test_rank_that_recorded_fewer_steps_and_came_is_not_accused() -> None:
    fewer = rank_with(0, [*reduces(range(1, 3)), *seen(40, 9 * S)])
    assert read(fewer, rank_with(1, [*reduces(range(1, 41)), *seen(40, 9 * S)])).stalls == ()


def test_collective_that_has_returned_is_none_that_a_rank_waits_for() -> None:
    """A root need not wait for the others."""
    root = rank_with(0, [("broadcast", 1, 0, {"end_ns": 5}), *seen(1, 9 * S)])
    assert read(root, rank_with(1, seen(0, 9 * S))).stalls == ()


def test_rank_that_waits_is_told_even_if_a_lower_one_has_just_come() -> None:
    late = rank_with(0, [("all_reduce", 1, 8900 * MS, {}), *seen(1, 9 * S)], world=3)
    waits = rank_with(2, [("all_reduce", 1, 0, {}), *seen(1, 9 * S)], world=3)
    [stall] = read(late, rank_with(1, seen(0, 9 * S), world=3), waits).stalls
    assert (stall.where.rank, stall.came, stall.absent) == (2, (0, 2), (1,))


def test_culprit_of_a_chain_comes_first() -> None:
    """Rank 0 waits for rank 1, which waits for rank 2."""
    first, second = {"group": "a", "ranks": "0-1"}, {"group": "b", "ranks": "1-2"}
    ranks = (
        rank_with(0, [("all_reduce", 1, 0, first), (LAST, 1, 0, {**first, "end_ns": 9 * S})]),
        rank_with(
            1,
            [
                ("all_reduce", 1, 0, second),
                (LAST, 0, 0, {**first, "end_ns": 9 * S}),
                (LAST, 1, 0, {**second, "end_ns": 9 * S}),
            ],
        ),
        rank_with(2, [(LAST, 0, 0, {**second, "end_ns": 9 * S})]),
    )
    assert [stall.absent for stall in read(*ranks).stalls] == [(2,), (1,)]


def test_message_that_was_not_sent_names_the_sender() -> None:
    waits = rank_with(1, [("recv", 3, 0, {"peer": 0, "path": "stage", "phase": "forward"}), *seen(0, 9 * S)])
    other = {"peer": 1, "step": 1, "group": "other"}
    sent = [("send", number, number, {"peer": 1, "step": 1}) for number in (1, 2)]
    sender = rank_with(0, [*sent, ("send", 9, 3, other), *seen(0, 9 * S)])
    assert told(sender, waits)[:3] == [
        "rank 0 has not sent message 3 of group world to rank 1",
        "  rank 1 was there for 9.00s when last seen: step 0, stage, forward",
        "  the last of rank 0: send 9, step 1, outside of modules",
    ]


def test_message_that_has_come_accuses_nobody_whatever_rows_the_sender_has() -> None:
    received = rank_with(1, [("recv", 3, 0, {"peer": 0, "end_ns": 5}), *seen(0, 9 * S)])
    assert read(rank_with(0, seen(0, 9 * S)), received).stalls == ()


def test_ranks_that_call_different_collectives_are_told() -> None:
    own = {"dtype": "float32", "bytes_read": 40, "path": "a", "phase": "forward"}
    one = rank_with(0, [*reduces(range(1, 3)), ("all_reduce", 3, 0, own), *seen(3, 9 * S)], world=3)
    same = rank_with(2, [*reduces(range(1, 3)), ("all_reduce", 3, 0, own), *seen(3, 9 * S)], world=3)
    other = rank_with(1, [*reduces(range(1, 3)), ("all_gather", 3, 0, {**own, "path": "b"})], world=3)
    assert told(one, other, same)[:3] == [
        "ranks call different collectives as number 3 of group world",
        "  the ranks 0,2: all_reduce, float32, 40B: step 0, a, forward",
        "  rank 1: all_gather, float32, 40B: step 0, b, forward",
    ]


@pytest.mark.parametrize(("complete", "is_told"), [(True, False), (False, True)])
def test_other_sizes_are_told_of_a_run_that_did_not_end_well(complete: bool, is_told: bool) -> None:
    """A healthy one may have sparse tensors, which are of any size."""
    marks = () if complete else ("not closed: the process ended",)
    ranks = [
        rank_with(rank, [("all_reduce", 1, 0, {"bytes_read": 8 * rank})], complete=complete, marks=marks)
        for rank in (0, 1)
    ]
    assert (read(*ranks).mismatch is not None) == is_told


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


def test_layer_that_takes_longer_there_is_named_and_waiting_is_no_work() -> None:
    """On rank 2 `slow` takes 18 ms more; in `waits` it waits longer than the others, for what they are not part of."""
    ranks = []
    for rank in range(3):
        build = RecordingBuilder(rank=rank, world_size=3, process=f"a ns {rank} 1")
        net = build.module("", "Net")
        slow, waits = (build.module(name, "Layer", parent=net) for name in ("slow", "waits"))
        for step in range(20):
            start_ns = step * 100 * MS
            work_ns = 20 * MS if rank == 2 else 2 * MS
            build.step(step, start_ns, start_ns + 60 * MS)
            end_ns = start_ns + (90 if rank == 2 else 40) * MS
            outer = build.call(net, start_ns, end_ns)
            build.call(slow, start_ns, start_ns + work_ns, parent=outer)
            call = build.call(waits, start_ns + work_ns, end_ns, parent=outer)
            build.collective(
                "all_reduce",
                step + 1,
                start_ns + work_ns + 1 * MS,
                call_id=call,
                phase="forward",
                end_ns=end_ns,
                wait_ns=end_ns - start_ns - work_ns - 1 * MS,
                ranks="0-2",
            )
        ranks.append((rank, build.data()))
    found = read(*ranks).straggler
    assert found is not None
    assert (found.rank, found.slow_path, found.slow_ns) == (2, "slow", 18 * MS)
    assert [(of.collectives, of.wait_ns) for of in read(*ranks).traffic] == [
        (1, 37 * MS),
        (1, 37 * MS),
        (1, 69 * MS),
    ]


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


def test_clocks_of_machines_that_are_apart_accuse_nobody() -> None:
    """Without ends of collectives nothing tells how far they are apart."""
    ranks = []
    for rank, host in ((0, "a"), (1, "b")):
        rows = [
            ("all_reduce", step + 1, step * 100 * MS + rank * 20 * MS, {"step": step}) for step in range(40)
        ]
        ranks.append(rank_with(rank, rows, steps=40, process=f"{host} ns {rank} 1"))
    assert read(*ranks).straggler is None
    same = [rank_with(rank, rows_of(data), steps=40, process=f"a ns {rank} 1") for rank, data in ranks]
    found = read(*same).straggler
    assert found is not None
    assert (found.rank, round(found.late_ns)) == (1, 20 * MS)


def rows_of(data: RecordingData) -> Rows:
    rows = data.table("collectives").to_pylist()
    return [(row["name"], row["seq_id"], row["start_ns"], {"step": row["step"]}) for row in rows]


def test_rank_that_is_last_by_little_is_no_straggler() -> None:
    ranks = [
        rank_with(
            rank,
            [("all_reduce", step + 1, step * 100 * MS + rank * MS, {"step": step}) for step in range(50)],
            steps=50,
            process=f"a ns {rank} 1",
        )
        for rank in (0, 1)
    ]
    assert read(*ranks).straggler is None


def test_too_few_steps_prove_nothing() -> None:
    assert read(*late_ranks(18, world=2, steps=5)).straggler is None
