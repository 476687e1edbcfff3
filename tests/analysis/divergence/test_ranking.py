"""Which of several differences is named first, and how much of one is noise."""

from collections.abc import Sequence

import numpy as np
import pytest

from modtrace.analysis.divergence.answer import VERDICTS
from modtrace.analysis.divergence.errors import METRICS, Errors, compare_statistics
from modtrace.analysis.divergence.noise import Noise, give_noise, measure_noise
from modtrace.analysis.divergence.pair_inputs import PairInputs
from modtrace.analysis.divergence.ranking import Ranking, choose_first, first_of_each, rank
from modtrace.recording.statistics.moments import Stats, columns_of


def ranked(
    error: Sequence[float],
    inputs: Sequence[float],
    *,
    noise: Noise | None = None,
    is_copy: Sequence[bool] | None = None,
    is_source: Sequence[bool] | None = None,
    metric: str = "tensors",
) -> Ranking:
    """A ranking of pairs of which each is apart by `error`, and what it was computed from by `inputs`."""
    count = len(error)
    none, no = np.full(count, -1), np.zeros(count, bool)
    errors = Errors(
        error=np.array(error),
        floor=np.zeros(count),
        metric=np.full(count, METRICS.index(metric)),
        is_unequal=no,
    )
    pair_inputs = PairInputs(
        error=np.array(inputs, float),
        is_known=~no,
        is_partial=no,
        through=none,
        through_b=none,
        is_source=no if is_source is None else np.array(is_source),
        is_update=no,
        is_of_optimizer=no,
        is_copy=no if is_copy is None else np.array(is_copy),
    )
    return rank(errors, pair_inputs, noise or give_noise(1e-6, count), ~no)


def test_op_that_makes_an_error_stands_before_a_larger_one_that_was_inherited() -> None:
    assert choose_first(ranked([0.0, 1e-3, 0.5], [0.0, 0.0, 1e-3])) == 1


def test_small_difference_of_its_own_hides_no_later_one_that_is_a_thousand_times_larger() -> None:
    apart = ranked([3e-6, 1.0], [1e-4, 1e-5])
    assert apart.is_beyond.tolist() == [True, True]
    assert choose_first(apart) == 1


def test_equal_inputs_and_four_times_the_noise_are_a_verdict_whatever_comes_later() -> None:
    assert choose_first(ranked([5e-6, 1.0], [0.0, 1e-5])) == 0


def test_nothing_beyond_the_noise_names_nothing() -> None:
    assert choose_first(ranked([1e-6, 0.0], [0.0, 0.0])) is None
    assert choose_first(ranked([], [])) is None


def test_tensor_that_is_another_pair_too_is_not_named_twice() -> None:
    assert ranked([1e-3, 1e-3], [0.0, 0.0], is_copy=[False, True]).is_beyond.tolist() == [True, False]


@pytest.mark.parametrize(("metric", "is_beyond"), [("statistics", False), ("tensors", True)])
def test_statistics_of_what_a_moved_parameter_leads_to_are_excused(metric: str, is_beyond: bool) -> None:
    """The second pair reads what an optimizer has moved, of which statistics show a hundredth."""
    ranking = ranked([3e-7, 3e-6], [1e-7, 1e-8], is_source=[True, False], metric=metric)
    assert ranking.is_beyond.tolist() == [False, is_beyond]


def test_each_step_and_phase_has_a_first() -> None:
    ranking = ranked([1e-3, 1e-3, 1e-3, 0.0], [0.0, 0.0, 0.0, 0.0])
    steps, phases = np.array([0, 0, 1, 1]), np.array([0, 1, 0, 1])
    assert first_of_each(ranking.find_verdicts(0), steps, phases).tolist() == [0, 1, 2]


@pytest.mark.parametrize("error", [np.inf, 1.7e308, 1e-320])
def test_errors_of_any_size_are_ranked_without_a_warning(error: float) -> None:
    with np.errstate(all="raise", under="ignore"):
        ranking = ranked([error, 1.0], [0.0, error])
    assert np.isfinite(ranking.score).all()
    assert ranking.is_beyond[0] == (error > 1e-6)


def test_noise_of_further_runs_is_four_times_what_they_show() -> None:
    noise = measure_noise([np.array([1e-6, np.nan, np.inf]), np.array([2e-6, np.nan, 0.0])], np.ones(3))
    assert noise.local.tolist() == [8e-6, 8e-6, np.inf]  # a site that no further run has: the largest of all
    assert noise.text == "noise: measured by 2 further runs, up to 2.0e-06; 4 times that of a site is noise"


def test_extreme_is_compared_with_its_own_magnitude_and_others_with_the_root_mean_square() -> None:
    plain = Stats(count=100, min=-1.0, max=8.0, sum=0.0, sumsq=100.0)
    other = Stats(count=100, min=-1.0, max=10.0, sum=0.0, sumsq=100.0)
    small = Stats(count=100, min=-0.5, max=8.0, sum=0.0, sumsq=100.0)
    error, floor = compare_statistics(columns_of([plain, plain]), columns_of([other, small]))
    assert error.tolist() == [0.2, 0.5]
    assert floor.tolist() == [0.0, 0.0]


def test_behind_the_first_difference_inputs_apart_by_more_than_their_own_noise_are_no_noise() -> None:
    noise = Noise(
        kind="assumed",
        text="",
        local=np.full(4, 1e-6),
        accumulated=np.full(4, 1e-3),  # what rounding may have added up to
        uncancelled=np.full(4, 1e-3),
        gain=np.ones(4),
    )
    ranking = ranked([0.0, 1e-3, 7e-5, 5e-4], [0.0, 0.0, 8e-6, 1e-4], noise=noise)
    assert choose_first(ranking) == 1
    told = [VERDICTS[code] for code in ranking.find_verdicts(1)]
    assert told == ["equal", "made", "inherited", "inherited"]


def test_ten_times_the_error_of_the_inputs_is_amplified_and_by_statistics_a_hundred_times() -> None:
    error, inputs = [1e-2, 2e-2, 0.2], [0.0, 1e-3, 1e-3]
    for metric, expected in (
        ("tensors", ["amplified", "amplified"]),
        ("statistics", ["inherited", "amplified"]),
    ):
        told = [VERDICTS[code] for code in ranked(error, inputs, metric=metric).find_verdicts(0)]
        assert told == ["made", *expected]


def test_what_differs_without_a_difference_beyond_noise_is_noise() -> None:
    assert [VERDICTS[code] for code in ranked([0.0, 1e-7], [0.0, 0.0]).find_verdicts(None)] == [
        "equal",
        "noise",
    ]
