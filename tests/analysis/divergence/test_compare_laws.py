"""What holds of any two recordings: which one is first does not matter, and numpy has nothing to warn of."""

from collections.abc import Sequence

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from builders import RecordingBuilder, TypedRecording
from helpers.fuzzed import FUZZ
from modtrace.analysis.divergence.compare import compare_recordings

pytestmark = pytest.mark.filterwarnings("error")

MODULES = 3

NUMBERS = st.one_of(
    st.sampled_from([0.0, 1.0, -1.0, 1e-320, 1e-160, 1e160, 1.7e308, float("inf"), float("nan")]),
    st.floats(-4, 4),
)
#: Of each module what it returned; None: it is not there.
RUNS = st.lists(
    st.one_of(st.none(), st.lists(NUMBERS, min_size=2, max_size=2)), min_size=MODULES, max_size=MODULES
).filter(lambda run: any(run))


def recording(outputs: Sequence[Sequence[float] | None]) -> TypedRecording:
    build = RecordingBuilder()
    net = build.module("", "Net")
    build.step(0, 0, 1000)
    outer = build.call(net, 0, 900, nth=0)
    made = build.tensor([2])
    for at, numbers in enumerate(outputs):
        if numbers is not None:
            module = build.module(f"m{at}", "Linear", parent=net)
            call = build.call(module, 100 * at + 10, 100 * at + 90, parent=outer, nth=0)
            op = build.op(call, "aten.addmm.default", 100 * at + 20, 100 * at + 30)
            build.use(made, op=op)
            made = build.tensor([2], producer=op)
            build.value(build.site(module, "op_output", nth=0), numbers, call=call, op_id=op, order=at)
            build.output(call, numbers, order=at)
    build.output(outer, [1.0, 2.0], order=MODULES)
    return build.data()


@settings(max_examples=8 * FUZZ, deadline=None)
@given(RUNS, RUNS, st.sampled_from([None, 0.0, 1e-3]))
@example(one=[None, [1.0, 1e-320], [0.0, 0.0]], other=[[0.0, 1.0], [0.0, 1.0], None], tolerance=0.0)
def test_order_of_two_recordings_does_not_decide_whether_they_agree(
    one: list[list[float] | None], other: list[list[float] | None], tolerance: float | None
) -> None:
    a, b = recording(one), recording(other)
    found, back = (compare_recordings(*pair, tolerance=tolerance) for pair in ((a, b), (b, a)))
    assert found.ok == back.ok
    assert (found.first is None) == (back.first is None)
    assert (found.compared, found.equal, found.within, found.beyond) == (
        back.compared,
        back.equal,
        back.within,
        back.beyond,
    )


@settings(max_examples=5 * FUZZ, deadline=None)
@given(RUNS, st.sampled_from([None, 0.0]))
def test_recording_equals_itself(run: list[list[float] | None], tolerance: float | None) -> None:
    found = compare_recordings(recording(run), recording(run), tolerance=tolerance)
    assert found.ok
    assert found.compared == found.equal


@settings(max_examples=5 * FUZZ, deadline=None)
@given(RUNS, RUNS)
def test_further_run_that_is_the_second_one_makes_all_of_it_noise(
    one: list[list[float] | None], other: list[list[float] | None]
) -> None:
    other = [mine and (theirs or [1.0, 2.0]) for mine, theirs in zip(one, other, strict=True)]
    found = compare_recordings(recording(one), recording(other), noise=[recording(other)])
    assert found.ok
