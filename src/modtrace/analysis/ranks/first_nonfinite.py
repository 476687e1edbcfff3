"""Finds the rank on which NaN or infinite values came up first."""

from collections.abc import Sequence
from typing import NamedTuple

from ...errors import NothingRecordedError
from ...recording.phase import BACKWARD, FORWARD, OPTIMIZER, RECOMPUTE
from ...recording.protocols import RecordingData
from ..provenance.search import find_all
from ..values.nonfinite import PRODUCER, NonFinite

#: The phases in the order in which values pass through them, also from one rank to another.
_ORDER = {None: -1, FORWARD: 0, RECOMPUTE: 1, BACKWARD: 1, OPTIMIZER: 2}


class RankAnswer(NamedTuple):
    """What made the first NaN or infinite values on a rank."""

    rank: int
    found: NonFinite


def find_first_of_ranks(ranks: Sequence[tuple[int, RecordingData]]) -> list[RankAnswer]:
    """Returns the first answer of each rank that has one, that of the rank where the values came up first in front.

    A rank that has them in an earlier step, or in an earlier phase of the same step, is in front of one that may have
    been given them: by an all-reduce of gradients, say. In one phase, a rank where an op made them is in front of one
    that only held them.

    Raises:
        NothingRecordedError: no rank has measured a tensor.
    """
    answers: list[RankAnswer] = []
    missing: list[NothingRecordedError] = []
    for rank, data in ranks:
        try:
            found = next(find_all(data), None)
        except NothingRecordedError as error:
            missing.append(error)
            continue
        if found is not None:
            answers.append(RankAnswer(rank, found))
    if len(missing) == len(ranks):
        raise missing[0]
    return sorted(answers, key=_when)


def _when(answer: RankAnswer) -> tuple[int, int, bool, int]:
    found = answer.found
    phase = found.phase if found.phase is not None else found.follows
    return found.step, _ORDER.get(phase, 0), found.kind not in (PRODUCER, None), answer.rank
