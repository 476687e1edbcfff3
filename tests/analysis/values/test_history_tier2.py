"""Histories of what tier 2 measures."""

import re
from typing import Any

import numpy as np
import pytest

from builders import RecordingBuilder, TypedRecording
from modtrace.analysis.values.exponents import LOWEST, build_exponents
from modtrace.analysis.values.history import build_history
from modtrace.analysis.values.selection import Selection


def tier2_of(numbers: list[float]) -> dict[str, Any]:
    """The columns of tier 2 of a few numbers, without the library's help."""
    array = np.array(numbers)
    finite = array[np.isfinite(array) & (array != 0)]
    bins = np.clip(np.floor(np.log2(np.abs(finite))).astype(int) - LOWEST + 1, 0, 255)
    return {
        "sumabs": float(np.abs(array).sum()),
        "zero_count": int((array == 0).sum()),
        "sum4": float((array**4).sum()),
        "argmax": int(np.abs(array).argmax()) if len(array) else None,
        "histogram": np.bincount(bins, minlength=256).tolist(),
    }


def recording(*steps: list[list[float]]) -> TypedRecording:
    """What `fc` returned: in each step, call by call."""
    build = RecordingBuilder()
    fc = build.module("fc", "Linear", parent=build.module("", "Net"))
    for step, calls in enumerate(steps):
        build.step(step, 100 * step, 100 * step + 99)
        for nth, numbers in enumerate(calls):
            call = build.call(fc, 100 * step + 2 * nth, 100 * step + 2 * nth + 1, nth=nth)
            build.output(call, numbers, **tier2_of(numbers))
    return build.data()


def values(data: TypedRecording, stat: str, **wanted: Any) -> list[float]:
    return build_history(data, stat, Selection(**wanted)).values[:, 0].tolist()


@pytest.mark.parametrize(
    ("stat", "expected"),
    [
        ("mean_abs", 2.0),
        ("zero_fraction", 0.25),
        ("zero_count", 1.0),
        ("sumabs", 8.0),
        ("sum4", 1 + 81 + 256),
        ("kurtosis", 4 * (1 + 81 + 256) / 26**2),
        ("crest", 4 / np.sqrt(26 / 4)),
        ("nan_fraction", 0.0),
        ("dynamic_range", 2.0),
        ("quantile:0.5", np.sqrt(2)),
        ("quantile:0.2", 0.0),
        ("underflow:fp16", 0.0),
        ("overflow:e4m3", 0.0),
        ("flushed:e5m2", 0.0),
    ],
)
def test_rows_of_one_step_are_merged_as_one_tensor(stat: str, expected: float) -> None:
    data = recording([[1.0, 0.0], [-3.0, 4.0]])

    assert values(data, stat) == [pytest.approx(expected)]


def test_what_a_format_would_lose_is_counted() -> None:
    data = recording([[2.0**-15, 2.0**-25, 1.0, 70000.0]])

    assert values(data, "underflow:fp16") == [0.5]
    assert values(data, "flushed:fp16") == [0.25]
    assert values(data, "overflow:fp16") == [0.25]


def test_what_may_be_within_a_format_does_not_overflow_and_a_range_is_the_least_it_may_be() -> None:
    """The largest number of e4m3 is 448: between 256 and 512 a histogram cannot tell."""
    data = recording([[1.0, 480.0, 512.0, 2.0**-140]])
    assert values(data, "overflow:e4m3") == [0.25]
    assert values(data, "dynamic_range") == [9.0 + 127]


def test_the_place_of_the_largest_is_known_of_one_row_only() -> None:
    one, two = values(recording([[1.0, -3.0]], [[1.0], [2.0]]), "argmax")
    assert one == 1.0 and np.isnan(two)


@pytest.mark.parametrize("stat", ["kurtosis", "underflow:bf16", "quantile:0.99", "dynamic_range"])
def test_what_was_not_measured_says_what_measures_it(stat: str) -> None:
    build = RecordingBuilder()
    build.step(0, 0, 100)
    build.parameter(build.module("", "Net"), "w", [1.0])

    with pytest.raises(ValueError) as raised:
        build_history(build.data(), stat, Selection(role="parameter"))
    assert str(raised.value) == (
        f"stat={stat!r} was not measured here. "
        "Record it with values=modtrace.Capture(stats=2) (modtrace record --capture stats=2)."
    )


@pytest.mark.parametrize(
    ("stat", "text"),
    [
        ("underflow", "there is no such statistic. Did you mean 'underflow:FORMAT'?"),
        ("underflow:fp8", "no such number format; there are: float32, bf16, fp16, e4m3, e5m2"),
        ("quantile:2", "give a part between 0 and 1"),
        ("quantile:x", "give a part between 0 and 1"),
        ("quantile:nan", "give a part between 0 and 1"),
    ],
)
def test_what_is_asked_for_must_be_there(stat: str, text: str) -> None:
    with pytest.raises(ValueError, match=f"^{re.escape(f'stat={stat!r}: {text}')}"):
        values(recording([[1.0]]), stat)


# The spread over powers of two.


def test_the_exponents_of_one_site_have_a_row_a_step() -> None:
    found = build_exponents(recording([[1.0, 3.0], [2.0, 0.0]], [[0.5, np.inf]]), Selection(path="fc"))

    assert found.steps == (0, 1)
    assert found.sites == ("fc", "fc")
    shares = {2.0**0: (0.25, 0.0), 2.0**1: (0.5, 0.0), 2.0**-1: (0.0, 0.5)}
    expected = np.zeros((2, 256))
    for power, share in shares.items():
        expected[:, int(np.log2(power)) - LOWEST + 1] = share
    np.testing.assert_array_equal(found.shares, expected)
    assert found.zero.tolist() == [0.25, 0.0]
    assert found.nonfinite.tolist() == [0.0, 0.5]


def test_the_exponents_of_many_sites_are_of_one_step() -> None:
    build = RecordingBuilder()
    net = build.module("", "Net")
    for step in range(2):
        build.step(step, 100 * step, 100 * step + 99)
        for name in "ab":
            module = build.module(name, "Linear", parent=net, module_id=1 + "ab".index(name))
            begin = 100 * step + 10 * "ab".index(name)
            build.output(build.call(module, begin, begin + 5, nth=0), [1.0], **tier2_of([1.0]))

    found = build_exponents(build.data(), Selection(), step=1)
    assert (found.steps, found.sites) == ((1, 1), ("a", "b"))
    with pytest.raises(
        ValueError, match=r"^no path means 2 sites \(a, b\), and a histogram over steps is of one\."
    ):
        build_exponents(build.data(), Selection())


def test_exponents_that_were_not_recorded_say_what_records_them() -> None:
    build = RecordingBuilder()
    build.step(0, 0, 100)
    build.parameter(build.module("", "Net"), "w", [1.0])

    with pytest.raises(ValueError, match=r"^no histograms were recorded of these tensors\."):
        build_exponents(build.data(), Selection(role="parameter"))


def with_histograms_in(measured: list[int], *, steps: int) -> RecordingBuilder:
    """One output in each step, which is 1."""
    build = RecordingBuilder()
    fc = build.module("fc", "Linear", parent=build.module("", "Net"))
    for step in range(steps):
        build.step(step, 100 * step, 100 * step + 99)
        call = build.call(fc, 100 * step, 100 * step + 1, nth=0)
        build.output(call, [1.0], **(tier2_of([1.0]) if step in measured else {}))
    return build


def test_histograms_of_other_steps_are_named_where_there_is_none() -> None:
    build = with_histograms_in([0, 5, 10], steps=12)
    for wanted, step, asked in (
        (Selection(), 3, "step=3"),
        (Selection(path="fc", steps="6:10"), None, "steps='6:10'"),
        (Selection(steps=[0, 5]), np.int64(4), "step=4"),
    ):
        with pytest.raises(ValueError) as raised:
            build_exponents(build.data(), wanted, step=step)
        assert str(raised.value).replace("np.int64(4)", "4") == (
            f"{asked}: no histogram was recorded there; there are some in steps 0, 5, 10"
        )


def test_a_step_that_nothing_was_measured_in_is_named_as_it_was_given() -> None:
    with pytest.raises(ValueError) as raised:
        build_exponents(recording([[1.0]]), Selection(), step=3)
    assert str(raised.value) == "step=3: nothing was measured there; there are: 0"


def test_steps_without_a_histogram_are_left_out() -> None:
    build = with_histograms_in([0, 2], steps=3)
    assert build_exponents(build.data(), Selection(path="fc")).steps == (0, 2)


def test_a_tensor_without_elements_has_no_shares() -> None:
    found = build_exponents(recording([[]]), Selection())
    assert np.isnan(found.shares).all() and np.isnan(found.zero).all()
