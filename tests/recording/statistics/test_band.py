"""The band of a whole series says of each number what the band that follows its steps says."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from modtrace.recording.statistics.band import StepBand, judge_series

NUMBERS = st.lists(st.floats(-1e6, 1e6) | st.sampled_from([float("nan"), float("inf")]), max_size=40)


@given(NUMBERS, st.integers(2, 6), st.sampled_from([1.0, 4.0]))
def test_series_is_judged_as_step_by_step(numbers: list[float], window: int, factor: float) -> None:
    values = np.array(numbers, np.float64)
    series = judge_series(values, factor, window, 2)
    band = StepBand(factor, window, 2)
    rows = band.rows_of(["loss"])
    for at in range(len(values)):
        judged = band.judge(rows, values[at : at + 1])
        np.testing.assert_equal([column[0] for column in judged], [column[at] for column in series])
        band.add(rows, values[at : at + 1])
