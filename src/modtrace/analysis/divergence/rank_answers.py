"""Merges the comparisons of the ranks of two runs into one answer, and marks runs whose ranks have parted."""

import sys
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from ...recording.protocols import RecordingData
from ..ranks.replicas import check_replicas
from ..tables.columns import ArrowTable, build_table, take_of_tables
from ..tables.rank_values import PHASE_ORDER, StepOrder
from ..tables.ranks import RanksData
from .answer import FIRST, SECOND, Comparison, Divergence

_COUNTS = ("compared", "equal", "within", "absorbed", "beyond", "inherited", "made", "unmeasured")

#: What only one run has, or has in another shape: of the first rank where there is any.
_UNPAIRED = ("missing", "extra", "reshaped")

_PLACE = ("step", "phase", "root", "path", "call", "op", "op_nth", "only_in", "role", "slot")


def merge_answers(answers: Mapping[int, Comparison], marks: tuple[str, ...]) -> Comparison:
    """Returns the answer of two runs on one mesh, whose ranks were compared one by one.

    Args:
        answers: the answer of each rank.
        marks: those of both runs.
    """
    ranks = sorted(answers, key=lambda rank: (*_find_moment(answers[rank]), rank))
    found = [answers[rank] for rank in ranks]
    divergences = _unite({rank: answers[rank].divergences for rank in ranks})
    firsts = dict[tuple[int, str | None], Divergence]()
    for divergence in _unite({rank: answers[rank].firsts for rank in ranks}):
        firsts.setdefault((divergence.step, divergence.phase), divergence)
    absorbed = [answer.absorbed_most for answer in found if answer.absorbed_most is not None]
    summed: dict[str, Any] = {name: sum(getattr(answer, name) for answer in found) for name in _COUNTS}
    unpaired: dict[str, Any] = {
        name: next(filter(None, (getattr(answer, name) for answer in found)), getattr(found[0], name))
        for name in _UNPAIRED
    }
    return replace(
        found[0],
        ok=all(answer.ok for answer in found),
        first=next(iter(divergences), None),
        divergences=divergences,
        firsts=tuple(sorted(firsts.values(), key=lambda one: (one.step, PHASE_ORDER[one.phase]))),
        absorbed_most=max(absorbed, key=lambda one: one.error, default=None),
        is_void=any(answer.is_void for answer in found),
        by_ops=all(answer.by_ops for answer in found),
        marks=marks,
        ranks=tuple(sorted(answers)),
        table=_join_tables({rank: answers[rank].table for rank in sorted(answers)}),
        metrics=tuple(_add(answer.metrics for answer in found).items()),
        unmeasured_why=tuple(_add(answer.unmeasured_why for answer in found).most_common()),
        **summed,
        **unpaired,
    )


def _find_moment(answer: Comparison) -> tuple[int, ...]:
    """Returns when two runs part on one rank, in numbers that all ranks share, as they run one program."""
    if answer.first is None or answer.pair is None:
        return sys.maxsize, int(answer.ok)
    step = StepOrder(answer.pair.own).place(answer.first.step)
    return step, PHASE_ORDER[answer.first.phase], answer.pair.position


def _unite(places: Mapping[int, Sequence[Divergence]]) -> tuple[Divergence, ...]:
    """Returns the places of all ranks, each once, with the ranks that have it."""
    known, ranks = dict[tuple[Any, ...], Divergence](), defaultdict[tuple[Any, ...], list[int]](list)
    for rank, of_rank in places.items():
        for divergence in of_rank:
            key = tuple(getattr(divergence, name) for name in _PLACE)
            known.setdefault(key, divergence)
            ranks[key].append(rank)
    return tuple(replace(known[key], ranks=tuple(sorted(ranks[key]))) for key in known)


def _add(counts: Iterable[tuple[tuple[str, int], ...]]) -> Counter[str]:
    return sum((Counter(dict(of_rank)) for of_rank in counts), Counter[str]())


def _join_tables(tables: Mapping[int, ArrowTable]) -> ArrowTable:
    """Returns the tables of all ranks as one, with the column `rank`."""
    sizes = [table.num_rows for table in tables.values()]
    joined = take_of_tables([*tables.values()], np.arange(sum(sizes)))
    columns = {name: joined[name] for name in joined.column_names}
    return build_table({**columns, "rank": np.repeat([*tables], sizes)})


def mark_unlike_replicas(a: RecordingData, b: RecordingData) -> Iterator[str]:
    """Yields what says that ranks of one run have parted: of replicas, only those of the lowest rank are compared."""
    for name, run in ((FIRST, a), (SECOND, b)):
        check = check_replicas(run.ranks) if isinstance(run, RanksData) and len(run.ranks) > 1 else None
        if check is not None and check.first and not check.may_be_own:
            yield f"{name}: {check.first[0]}; modtrace ranks tells more"
