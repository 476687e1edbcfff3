"""Finds the rank on which NaN or infinite values came up first."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from ...errors import NothingRecordedError
from ...recording.arrow.arrays import to_numpy
from ...recording.phase import PHASES
from ...recording.protocols import RecordingData
from ..provenance.search import find_all
from ..tables.columns import column_of, phase_codes
from ..tables.rank_values import PHASE_ORDER, StepOrder
from ..values.nonfinite import NonFinite


class RankAnswer(NamedTuple):
    """What made the first NaN or infinite values on a rank."""

    rank: int
    found: NonFinite


class RankAnswers(NamedTuple):
    """What made the first NaN or infinite values on each rank that has any, and which ranks measured nothing."""

    answers: list[RankAnswer]
    unmeasured: list[int]


def find_first_of_ranks(ranks: Sequence[tuple[int, RecordingData]]) -> RankAnswers:
    """Returns the first answer of each rank that has one, that of the rank where the values came up first in front.

    A rank that has them in an earlier step, or in an earlier phase of the same step, is in front of one that may have
    been given them: by an all-reduce of gradients, say. So is, in one phase, a rank that has them at an earlier place
    of the program, which all ranks run.

    Raises:
        NothingRecordedError: no rank has measured a tensor.
    """
    answers: list[tuple[tuple[int, ...], RankAnswer]] = []
    missing: dict[int, NothingRecordedError] = {}
    for rank, data in ranks:
        try:
            found = next(find_all(data), None)
        except NothingRecordedError as error:
            missing[rank] = error
            continue
        if found is not None:
            answers.append((_when(data, found), RankAnswer(rank, found)))
    if len(missing) == len(ranks):
        raise missing[ranks[0][0]]
    return RankAnswers(
        [answer for _, answer in sorted(answers, key=lambda pair: (pair[0], pair[1].rank))], [*missing]
    )


def _when(data: RecordingData, found: NonFinite) -> tuple[int, ...]:
    phase = found.phase if found.phase is not None else found.follows
    return StepOrder(data).place(found.step), PHASE_ORDER.get(phase, 0), _find_moment(data, found)


def _find_moment(data: RecordingData, found: NonFinite) -> int:
    """Returns the number of the first measurement of such values in the phase, among those of its step."""
    table = data.table("values").select(["step", "phase", "order", "nan_count", "inf_count"])
    rows = column_of(table, "step") == found.step
    rows &= (to_numpy(table["nan_count"]) if found.nan_count else column_of(table, "inf_count")) > 0
    if found.phase is not None:
        rows &= phase_codes(table["phase"]) == PHASES.index(found.phase)
    moments = column_of(table, "order")[rows]
    return int(np.min(moments, initial=np.iinfo(np.int64).max))
