"""Finds the rank for which the others wait, and in which of its layers the time goes."""

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import exp, lgamma, log, log1p
from statistics import median

import numpy as np

from ...recording.arrow.arrays import from_numpy
from ...recording.phase import FORWARD, PHASES
from ...recording.protocols import RecordingData
from ..tables.calls import Calls, read_all_calls
from ..tables.collectives import SYNCHRONIZING, Collective, RankCollectives
from ..tables.columns import Column, column_of, find_rows
from ..tables.placement import Placer

#: A rank is late in a step if it comes this much later, as a part of the step's time.
_LATE_PART = 0.1

#: The chance of coming last in as many steps by accident, below which a rank is accused.
_BY_CHANCE = 1e-4

#: The fewest collectives with an end by which clocks are aligned.
_FEWEST_ENDS = 10

#: The first collective to which the rank is late by this part of its greatest lateness in the step is shown.
_FIRST_PART = 0.8

#: The newest steps of which the times of layers are compared.
_NEWEST_STEPS = 100

#: A layer explains a delay if it takes this part of it longer than on the other ranks.
_EXPLAINING_PART = 0.3


@dataclass(frozen=True, kw_only=True)
class Straggler:
    """A rank that comes last to collectives in most steps."""

    rank: int
    late_steps: int  # in which it comes last, by more than `_LATE_PART`
    steps: int  # in which ranks wait for each other
    late_ns: float  # the median, in these, of how much later than the median of the other ranks it comes
    name: str  # the collective to which it comes last
    path: str | None  # of the module that issues it; None if it is not known
    slow_path: str | None  # the module that takes longer than on the other ranks; None if none does
    slow_ns: float  # how much longer its forward calls take in a step, without those inside of them


def find_straggler(
    ranks: Sequence[tuple[int, RecordingData]], collectives: RankCollectives, step_ns: float
) -> Straggler | None:
    """Returns the rank for which the others wait in most steps; None if there is none.

    Clocks of machines are aligned by the ends of collectives, which all ranks leave together.

    Args:
        ranks: the ranks with their numbers, at least two.
        collectives: what they sent each other.
        step_ns: the median time of a step.
    """
    added = _align(ranks, collectives)
    if added is None:
        return None
    late = _find_late(collectives, added)
    lateness = {step: one for step, one in late.items() if one[1] > _LATE_PART * step_ns}
    counts = Counter(row.rank for row, _ in lateness.values())
    rank, count = max(counts.items(), key=lambda item: item[1], default=(-1, 0))
    if count * 2 <= len(late) or _chance(count, len(late), 1 / len(ranks)) > _BY_CHANCE:
        return None
    own = [(row, by_ns) for row, by_ns in lateness.values() if row.rank == rank]
    late_ns = median(by_ns for _, by_ns in own)
    name, path = Counter((row.name, row.path) for row, _ in own).most_common(1)[0][0]
    slow_path, slow_ns = _find_slow_layer(ranks, rank, collectives)
    explains = slow_ns > _EXPLAINING_PART * late_ns
    return Straggler(
        rank=rank,
        late_steps=count,
        steps=len(late),
        late_ns=late_ns,
        name=name,
        path=path,
        slow_path=slow_path if explains else None,
        slow_ns=slow_ns if explains else 0.0,
    )


def _align(
    ranks: Sequence[tuple[int, RecordingData]], collectives: RankCollectives
) -> dict[int, float] | None:
    """Returns what to add to the times of each rank, so that they are those of the lowest one; None if unknown.

    Processes of one machine have one clock. The wall clocks of machines may be further apart than ranks are late.
    """
    lowest = ranks[0][0]
    machines = {_machine_of(data) for _, data in ranks}
    if len(machines) == 1 and machines != {""}:
        return dict.fromkeys((rank for rank, _ in ranks), 0.0)
    apart = defaultdict(list)
    for rows in _shared(collectives):
        first = rows.get(lowest)
        for rank, row in rows.items():
            if first is not None and first.end_ns is not None and row.end_ns is not None:
                apart[rank].append(first.end_ns - row.end_ns)
    if any(len(apart[rank]) < _FEWEST_ENDS for rank, _ in ranks):
        return None
    return {rank: median(differences) for rank, differences in apart.items()}


def _machine_of(data: RecordingData) -> str:
    """Returns the machine, and its namespace of processes, in which a rank ran; "" if it is not known."""
    return " ".join(data.meta.process.split(" ")[:2])


def _shared(collectives: RankCollectives) -> Iterator[Mapping[int, Collective]]:
    """Yields the collectives in which ranks wait for each other, by rank; those of which all ranks have a row."""
    found: dict[tuple[str, int], dict[int, Collective]] = defaultdict(dict)
    for rank, rows in collectives.of_ranks.items():
        for row in rows:
            if row.name in SYNCHRONIZING and row.seq_id is not None:
                found[row.group, row.seq_id][rank] = row
    for (group, _), by_rank in found.items():
        if len(by_rank) > 1 and by_rank.keys() == {*collectives.members[group]}:
            yield by_rank


def _find_late(
    collectives: RankCollectives, added: Mapping[int, float]
) -> dict[int, tuple[Collective, float]]:
    """Returns for each step a collective of the rank that is the latest in it, and how late it comes, in nanoseconds.

    It is the first one to which that rank comes nearly as late; see `_FIRST_PART`.
    """
    of_steps: dict[int, list[tuple[Collective, float]]] = defaultdict(list)
    for rows in _shared(collectives):
        came = {rank: row.start_ns + added[rank] for rank, row in rows.items()}
        last = max(came, key=came.__getitem__)
        by_ns = came[last] - median(at for rank, at in came.items() if rank != last)
        of_steps[rows[min(rows)].step].append((rows[last], by_ns))
    late = {}
    for step, found in of_steps.items():
        latest, most_ns = max(found, key=lambda one: one[1])
        of_rank = [one for one in found if one[0].rank == latest.rank and one[1] >= _FIRST_PART * most_ns]
        late[step] = min(of_rank, key=lambda one: one[0].start_ns)
    return late


def _chance(count: int, steps: int, part: float) -> float:
    """Returns the chance of `count` or more hits in as many steps; the tail of the binomial distribution."""
    return sum(
        exp(
            lgamma(steps + 1)
            - lgamma(hits + 1)
            - lgamma(steps - hits + 1)
            + hits * log(part)
            + (steps - hits) * log1p(-part)
        )
        for hits in range(count, steps + 1)
    )


def _find_slow_layer(
    ranks: Sequence[tuple[int, RecordingData]], rank: int, collectives: RankCollectives
) -> tuple[str | None, float]:
    """Returns the module whose forward calls take the most longer on a rank than on others, and how much, a step."""
    times = {number: _own_times(data, collectives.of_ranks[number]) for number, data in ranks}
    others = [of_rank for number, of_rank in times.items() if number != rank]
    longer = {
        path: own_ns - median(of_rank.get(path, own_ns) for of_rank in others)
        for path, own_ns in times[rank].items()
    }
    path = max(longer, key=longer.__getitem__, default=None)
    return path, 0.0 if path is None else longer[path]


def _own_times(data: RecordingData, rows: Sequence[Collective]) -> dict[str, float]:
    """Returns for each module how long its forward calls take in a step, without calls and waiting inside of them."""
    table = data.table("calls")
    step = column_of(table, "step")
    newest = np.unique(step)[-_NEWEST_STEPS:]
    calls = read_all_calls(table.filter(from_numpy(np.isin(step, newest))), Placer(data))
    own_ns = calls.duration_ns.astype(float)
    for level in calls.levels:
        inside = level[calls.parent[level] >= 0]
        np.subtract.at(own_ns, calls.parent[inside], calls.duration_ns[inside])
    _subtract_waits(rows, calls, own_ns)
    kept = (calls.phase == PHASES.index(FORWARD)) & (calls.place >= 0) & calls.ended
    total = np.bincount(calls.place[kept], own_ns[kept], minlength=len(calls.places))
    steps = max(len(np.unique(calls.column("step"))), 1)
    return {place.name: took_ns / steps for place, took_ns in zip(calls.places, total.tolist(), strict=True)}


def _subtract_waits(rows: Sequence[Collective], calls: Calls, own_ns: Column) -> None:
    waits = [row for row in rows if row.call_id is not None and row.wait_ns and row.phase == FORWARD]
    at = find_rows(calls.call_id, np.array([row.call_id for row in waits], np.int64))
    waited_ns = np.array([row.wait_ns for row in waits], float)
    np.subtract.at(own_ns, at[at >= 0], waited_ns[at >= 0])
