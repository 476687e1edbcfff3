"""Laws of alignments, for which Hypothesis looks for counter-examples."""

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from builders import RecordingBuilder, TypedRecording
from helpers.fuzzed import FUZZ
from modtrace.analysis.alignment.align import align
from modtrace.analysis.alignment.contract import Alignment, Unpaired
from modtrace.analysis.tables.columns import Rows

_OPS = ("aten.mm.default", "aten.add.Tensor", "aten.relu.default", "aten.view.default")

#: Of a call: which module, the ops inside, whether it is recomputed, and how deep it lies.
_CALLS = st.lists(
    st.tuples(
        st.sampled_from("abcd"), st.lists(st.sampled_from(_OPS), max_size=4), st.booleans(), st.integers(0, 2)
    ),
    max_size=6,
)
_STEPS = st.lists(_CALLS, min_size=1, max_size=3)


def _record(steps: list[list[tuple[str, list[str], bool, int]]]) -> TypedRecording:
    build = RecordingBuilder()
    net = build.module("", "Net", parameters=1)
    modules = {each: build.module(each, "Linear", parent=net, parameters=4) for each in "abcd"}
    at = 0
    for step, calls in enumerate(steps):
        build.step(step, at, at + 10_000)
        stack = [build.call(net, at, at + 9_000, nth=0)]
        nth = dict.fromkeys(modules, 0)
        for name, ops, recomputed, depth in calls:
            del stack[depth + 1 :]
            at += 100
            call = build.call(modules[name], at, at + 90, parent=stack[-1], nth=nth[name])
            nth[name] += 1
            for number, op in enumerate(ops):
                build.tensor([number + 1], producer=build.op(call, op, at + number, at + number + 1))
            build.output(call, [1.0, 2.0])
            if recomputed:
                again = build.recompute(call, at + 50, at + 60)
                build.output(again, [1.0, 2.0])
            build.op(build.backward(call, at + 70, at + 80), "aten.mm.default", at + 71, at + 72)
            stack.append(call)
        build.op(None, "aten.sum.default", at + 95, at + 96)
        build.optimizer(at + 9_100, at + 9_200)
        build.parameter(modules["a"], "weight", [1.0])
        at += 10_000
    return build.data()


def _require_each_row_once(found: Alignment, one: TypedRecording, other: TypedRecording) -> None:
    for table in ("calls", "ops", "values"):
        pairs: Rows = getattr(found, table)
        for column, data, unpaired in ((0, one, found.missing), (1, other, found.extra)):
            rows = np.concatenate([pairs[:, column], _rows(unpaired, table)])
            assert sorted(rows.tolist()) == list(range(data.table(table).num_rows))


def _rows(unpaired: Unpaired, table: str) -> Rows:
    rows: Rows = getattr(unpaired, table).rows
    return rows


@settings(deadline=None, max_examples=8 * FUZZ)
@given(_STEPS, _STEPS)
def test_each_row_is_in_a_pair_or_missing_or_extra_once(
    one: list[list[tuple[str, list[str], bool, int]]], other: list[list[tuple[str, list[str], bool, int]]]
) -> None:
    a, b = _record(one), _record(other)
    _require_each_row_once(align(a, b), a, b)
    _require_each_row_once(align(a, b, rules=["auto"]), a, b)


@settings(deadline=None, max_examples=5 * FUZZ)
@given(_STEPS)
def test_recording_is_aligned_with_itself(one: list[list[tuple[str, list[str], bool, int]]]) -> None:
    a, b = _record(one), _record(one)
    found = align(a, b)
    for pairs in (found.calls, found.ops, found.values):
        assert (pairs[:, 0] == pairs[:, 1]).all()
    assert not any(
        len(_rows(each, table))
        for each in (found.missing, found.extra)
        for table in ("calls", "ops", "values")
    )


@settings(deadline=None, max_examples=5 * FUZZ)
@given(_STEPS, _STEPS)
def test_other_order_of_the_recordings_exchanges_missing_and_extra(
    one: list[list[tuple[str, list[str], bool, int]]], other: list[list[tuple[str, list[str], bool, int]]]
) -> None:
    a, b = _record(one), _record(other)
    there, back = align(a, b), align(b, a)
    assert sorted(map(tuple, there.calls.tolist())) == sorted(map(tuple, back.calls[:, ::-1].tolist()))
    assert len(there.values) == len(back.values)
