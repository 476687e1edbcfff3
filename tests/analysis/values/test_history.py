"""How one statistic goes, step by step and site by site: which rows are meant, in which order, what is said if none."""

import json
import math
import warnings
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from builders import RecordingBuilder, TypedRecording
from helpers.typed_runs import typed_run
from helpers.typed_steps import begin_net, typed_net
from modtrace.analysis.values.history import History, build_history
from modtrace.analysis.values.selection import Selection
from modtrace.recording.meta import HELD, Note
from modtrace.recording.statistics.moments import Stats, merge


def history(data: TypedRecording, stat: str = "rms", **wanted: Any) -> History:
    return build_history(data, stat, Selection(**wanted))


def one_module(**module: Any) -> tuple[RecordingBuilder, int]:
    build, net = typed_net()
    return build, build.module("fc", "Linear", parent=net, **module)


def test_a_history_has_a_row_a_step_and_a_column_a_site() -> None:
    found = history(typed_run(), "max", path="blocks.*")

    assert found.steps.tolist() == [0, 1, 2]
    assert found.sites == ("blocks.0", "blocks.1", "blocks.2")
    assert found.values.tolist() == [[1.0, 2.0, 3.0], [1.0, 2.0, 3.0], [2.0, 2.0, 3.0]]
    assert (found.stat, found.role) == ("max", "output")
    assert found.measured.all() and not found.nonfinite.any()


def test_steps_of_a_history_have_their_kinds_and_how_many_of_other_kinds_come_before() -> None:
    build, fc = one_module()
    for number, kind in enumerate(("train", "train", "eval", "train", "eval")):
        build.step(number, 0, 10, kind=kind)
        build.output(build.call(fc, 1, 9, nth=0), [1.0])
    found = history(build.data(), path="fc")
    assert found.kinds == ("train", "train", "eval", "train", "eval")
    assert found.others_before.tolist() == [0, 0, 2, 1, 3]


def test_gradients_come_in_layer_order_although_backward_measures_the_last_layer_first() -> None:
    found = history(typed_run(), "min", role="grad_output")

    assert found.sites == ("blocks.0", "blocks.1", "blocks.2")
    assert found.values[0].tolist() == [-1.0, -2.0, -3.0]


def test_sites_are_in_the_order_of_the_forward_and_not_of_registration() -> None:
    build, net, outer = begin_net(100, 50, nth=0)
    last, first = build.module("a", "Linear", parent=net), build.module("b", "Linear", parent=net)
    never = build.module("c", "Linear", parent=net)
    calls = [build.call(first, 1, 9, parent=outer, nth=0), build.call(last, 11, 19, parent=outer, nth=0)]
    for call in reversed(calls):
        build.output(call, [1.0])
    build.output(outer, [1.0])
    build.parameter(never, "weight", [1.0])
    build.parameter(last, "weight", [1.0])
    build.parameter(last, "bias", [1.0])
    build.parameter(first, "weight", [1.0])

    assert history(build.data()).sites == ("Net", "b", "a")
    assert history(build.data(), role="parameter").sites == ("b.weight", "a.weight", "a.bias", "c.weight")


def test_a_frame_has_steps_as_its_index_and_sites_as_its_columns() -> None:
    frame = history(typed_run(), "max", path="blocks.[01]").to_frame()

    assert frame.index.name == "step"
    assert frame.columns.tolist() == ["blocks.0", "blocks.1"]
    assert frame.loc[2].tolist() == [2.0, 2.0]


def test_rows_of_one_site_in_a_step_are_merged_as_one_tensor() -> None:
    build, fc = one_module()
    build.step(0, 0, 100)
    for nth in range(2):
        build.output(build.call(fc, 10 * nth, 10 * nth + 5, nth=nth), [3.0] if nth else [4.0, 0.0, 0.0])

    both = history(build.data(), "rms")
    assert both.values.tolist() == [[2.5]]  # sqrt(25 / 4), and not the mean of 3 and 4 / sqrt(3)
    assert history(build.data(), "rms", call=1).values.tolist() == [[3.0]]
    assert history(build.data(), "count").values.tolist() == [[4.0]]


_NUMBERS = st.lists(st.floats(width=32), max_size=4)


@settings(max_examples=25, deadline=None)  # builds a recording
@given(st.lists(st.tuples(st.integers(0, 2), _NUMBERS), min_size=1, max_size=8))
def test_every_cell_is_the_merge_of_its_rows(rows: list[tuple[int, list[float]]]) -> None:
    build, fc = one_module()
    for step in range(3):
        build.step(step, 100 * step, 100 * step + 99)
        for nth, numbers in enumerate(numbers for at, numbers in rows if at == step):
            build.output(build.call(fc, 100 * step + nth, 100 * step + nth + 1, nth=nth), numbers)
    data = build.data()
    expected: dict[int, list[Stats]] = {}
    for row in data.table("values").to_pylist():
        raw = {name: row[name] for name in ("count", "min", "max", "sum", "sumsq", "nan_count", "inf_count")}
        expected.setdefault(row["step"], []).append(Stats(**raw))

    for stat in ("count", "min", "max", "mean", "std", "rms", "l2", "abs_max", "nonfinite"):
        found = history(data, stat)
        assert found.steps.tolist() == sorted(expected)
        wanted = [getattr(merge(expected[step]), stat) for step in sorted(expected)]
        floats = [math.nan if each is None else float(each) for each in wanted]
        np.testing.assert_array_equal(found.values[:, 0], floats)


def test_a_measurement_that_a_wrapper_shares_with_what_it_wraps_counts_once() -> None:
    build = RecordingBuilder()
    outer = build.module("", "OptimizedModule", name="Net")
    inner = build.module("", "Net", parent=outer, raw_path="_orig_mod")
    build.step(0, 0, 100)
    call = build.call(outer, 0, 50, nth=0)
    build.output(build.call(inner, 1, 40, parent=call, nth=0), [1.0, 2.0], order=0)
    build.output(call, [1.0, 2.0], order=0)

    assert history(build.data(), "count").values.tolist() == [[2.0]]


def test_a_recompute_is_not_merged_with_its_forward() -> None:
    build, fc = one_module()
    build.step(0, 0, 100)
    forward = build.call(fc, 0, 5, nth=0)
    build.output(forward, [1.0])
    build.output(build.recompute(forward, 50, 55, nth=0), [2.0])

    assert history(build.data(), "max").values.tolist() == [[1.0]]
    assert history(build.data(), "max", phase="recompute").values.tolist() == [[2.0]]


def test_a_parameters_gradient_is_that_of_the_optimizer_and_not_of_the_micro_batches() -> None:
    build, fc = one_module()
    build.step(0, 0, 100)
    site = build.site(fc, "parameter_grad", "weight")
    build.value(site, [1.0], phase="backward")
    build.value(site, [2.0], phase="backward")
    build.value(site, [3.0], phase="optimizer")

    assert history(build.data(), "sum", role="parameter_grad").values.tolist() == [[3.0]]
    assert history(build.data(), "count", role="parameter_grad", phase="backward").values.tolist() == [[2.0]]


def test_slots_are_sites_of_their_own_in_their_natural_order() -> None:
    build, fc = one_module()
    build.step(0, 0, 100)
    call = build.call(fc, 0, 5, nth=0)
    for slot in ("[10]", "[2]", ".logits"):
        build.output(call, [float(len(slot))], slot)

    assert history(build.data(), "max").sites == ("fc.logits", "fc[2]", "fc[10]")
    assert history(build.data(), "max", slot="[2]").values.tolist() == [[3.0]]


def test_two_roots_stand_in_front_of_the_paths() -> None:
    build = RecordingBuilder()
    build.step(0, 0, 100)
    for at, name in enumerate(("student", "teacher")):
        net = build.module("", "Net", name=name)
        fc = build.module("fc", "Linear", parent=net)
        outer = build.call(net, 40 * at, 40 * at + 30, nth=0)
        build.output(build.call(fc, 40 * at + 1, 40 * at + 2, parent=outer, nth=0), [1.0])
        build.output(outer, [1.0])

    assert history(build.data()).sites == ("student", "student/fc", "teacher", "teacher/fc")


def test_a_parameter_is_meant_by_its_own_path_and_by_its_modules() -> None:
    data = typed_run()
    for path in ("blocks.0", "blocks.0.weight", "**.weight", "re:weight$"):
        assert history(data, "l2", path=path, role="parameter").sites == ("blocks.0.weight",)


def test_a_parameter_that_no_module_owns_has_its_own_name() -> None:
    build = RecordingBuilder()
    build.step(0, 0, 100)
    build.parameter(None, "param_groups[0].params[3]", [1.0])

    assert history(build.data(), "max", role="parameter").sites == ("param_groups[0].params[3]",)


def test_an_update_has_its_size_relative_to_its_parameter() -> None:
    found = history(typed_run(), "relative", role="update")

    assert found.sites == ("blocks.0.weight",)
    assert found.values[:, 0] == pytest.approx([0.1, 0.1, 0.1])


def test_an_update_whose_parameter_was_not_measured_or_is_zero_has_no_finite_size() -> None:
    build, net = typed_net()
    for step, weight in enumerate(([3.0, 4.0], [0.0, 0.0], None)):
        build.step(step, 100 * step, 100 * step + 99)
        build.value(build.site(net, "update", "a"), [1.0], phase="optimizer")
        if weight is not None:
            build.parameter(net, "b", weight)
        build.value(build.site(net, "update", "b"), [0.3, 0.4], phase="optimizer")

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found = history(build.data(), "relative", role="update")
    assert (found.sites, found.stat, found.role) == (("a", "b"), "relative", "update")
    nan = math.nan
    np.testing.assert_array_equal(found.values, [[nan, 0.1], [nan, math.inf], [nan, nan]])


def test_a_cell_is_not_finite_if_one_of_its_rows_is_not() -> None:
    build, fc = one_module()
    build.step(0, 0, 100)
    for nth, number in enumerate((1.0, math.inf, 2.0)):
        build.output(build.call(fc, 10 * nth, 10 * nth + 5, nth=nth), [number])

    assert history(build.data()).nonfinite.tolist() == [[True]]
    assert history(build.data(), call=2).nonfinite.tolist() == [[False]]


def test_some_steps_alone_are_shown() -> None:
    data = typed_run(steps=(0, 1, 2, 3, 10))
    for steps, expected in (
        ("1:3", [1, 2]),
        (range(0, 4, 2), [0, 2]),
        ([3, 10], [3, 10]),
        (lambda step: step > 2, [3, 10]),
        (2, [2]),
    ):
        assert history(data, steps=steps).steps.tolist() == expected


def test_what_was_not_measured_is_told_from_what_is_not_finite() -> None:
    build, net = typed_net()
    a, b = build.module("a", "Linear", parent=net), build.module("b", "Linear", parent=net)
    for step in range(2):
        build.step(step, 100 * step, 100 * step + 99)
        build.output(build.call(a, 100 * step, 100 * step + 1, nth=0), [math.nan if step else 1.0])
        call = build.call(b, 100 * step + 2, 100 * step + 3, nth=0)
        build.output(call, None if step else [2.0], note="meta tensor")

    found = history(build.data(), "max")
    np.testing.assert_array_equal(found.values, [[1.0, 2.0], [math.nan, math.nan]])
    assert found.measured.tolist() == [[True, True], [True, False]]
    assert found.nonfinite.tolist() == [[False, False], [True, False]]


def test_numbers_that_a_function_of_the_users_returned_have_a_history() -> None:
    for user, stat, expected in (
        (1.5, "user", 1.5),
        ([2], "user", 2.0),
        (True, "user", 1.0),
        ({"entropy": 0.25}, "user:entropy", 0.25),
        ([{"entropy": 0.25}], "user:entropy", 0.25),
        ([1.0, {"top": [3, 4]}], "user:1:top:0", 3.0),
        ("text", "user", math.nan),
        ({"other": 1}, "user:entropy", math.nan),
        ([1.0, 2.0], "user:2", math.nan),
        ([1.0, 2.0], "user:mean", math.nan),
    ):
        found = history(typed_run(1, (0,), user=json.dumps(user)), stat)
        np.testing.assert_array_equal(found.values, [[expected]])


def test_values_of_the_users_do_not_merge() -> None:
    build, fc = one_module()
    build.step(4, 0, 100)
    for nth in range(2):
        build.output(build.call(fc, 10 * nth, 10 * nth + 5, nth=nth), [1.0], user=str(nth))

    with pytest.raises(
        ValueError, match=r"^stat='user': fc has 2 values of yours in step 4, and they do not merge\."
    ):
        history(build.data(), "user")
    assert history(build.data(), "user", call=1).values.tolist() == [[1.0]]


@pytest.mark.parametrize(
    ("stat", "wanted", "text"),
    [
        ("absmax", {}, "stat='absmax': there is no such statistic. Did you mean 'abs_max'?"),
        ("rms", {"path": "block.*"}, "path='block.*' matches no module with role='output'; the nearest are: blocks.0"),
        ("rms", {"path": ["blocks.*", "x.y"]}, "path='x.y' matches no module with role='output'"),
        ("rms", {"path": "blocks.[0"}, "path='blocks.[0' is not a glob: the [ at position 7 is not closed"),
        ("rms", {"role": "outputs"}, "role='outputs': give one of input, output, grad_output"),
        ("rms", {"role": "input"}, "role='input' was not measured; measured were: grad_output, output, parameter"),
        ("rms", {"phase": "eval"}, "phase='eval': give one of forward, backward, recompute, optimizer, or None"),
        ("rms", {"phase": "backward"}, "phase='backward': no such row with role='output' at path=None; there are: 'f"),
        ("rms", {"call": 2}, "call=2: no such row with role='output' at path=None; there are: 0"),
        ("rms", {"slot": "[0]"}, "slot='[0]': no such row with role='output' at path=None; there are: ''"),
        ("overflow:float16", {}, "stat='overflow:float16': no such number format; there are: float32, bf16"),
        ("quantile:99", {}, "stat='quantile:99': give a part between 0 and 1, as in quantile:0.99"),
        ("rms", {"steps": 7}, "step=7: nothing was measured there; there are: 0, 1, 2"),
        ("rms", {"steps": "5:9"}, "steps='5:9': nothing was measured there; there are: 0, 1, 2"),
        ("user", {}, "stat='user' was not measured here. Record it with Capture(function=...) in Python."),
        ("relative", {}, "stat='relative' is the size of updates: give role='update', not 'output'"),
    ],
)  # fmt: skip
def test_what_is_not_there_is_said(stat: str, wanted: dict[str, Any], text: str) -> None:
    with pytest.raises(ValueError) as raised:
        history(typed_run(), stat, **wanted)
    assert str(raised.value).startswith(text)


def test_why_nothing_was_measured_is_said() -> None:
    build, fc = one_module()
    build.step(0, 0, 100)
    build.output(build.call(fc, 0, 5, nth=0), None, note="meta tensor")

    with pytest.raises(ValueError, match=r"Of these tensors it says: meta tensor\.$"):
        history(build.data())


def test_a_recording_without_values_says_so() -> None:
    with pytest.raises(ValueError, match=r"^no values were recorded\. Record with values='stats'"):
        history(RecordingBuilder().data())


def test_a_path_that_is_none_of_those_is_a_type_error() -> None:
    with pytest.raises(TypeError, match=r"^path=3: give a glob"):
        history(typed_run(), path=3)


def test_what_an_op_of_the_optimizer_has_read_is_not_the_parameter_once_more() -> None:
    build, net = typed_net(100)
    site = build.site(net, "parameter", "weight")
    build.value(site, [1.0], phase="optimizer", op_id=build.op(None, "aten.mul_", 1, 2, phase="optimizer"))
    build.value(site, [1.0], phase="optimizer")

    assert history(build.data(), "count", role="parameter").values.tolist() == [[1.0]]


def test_outputs_of_ops_stand_in_the_order_in_which_the_ops_ran_with_all_their_slots_and_numbers() -> None:
    build = RecordingBuilder()
    fc = build.module("fc", "Linear", parent=build.module("", "Net"))
    build.step(0, 0, 100)
    call = build.call(fc, 0, 5, nth=0)
    ops = (("aten.split", "[0]", 0), ("aten.split", "[1]", 0), ("aten.relu", "", 0), ("aten.relu", "", 1))
    for site, (op, slot, op_nth) in enumerate(ops):
        row = {"site_id": site, "module_id": fc, "nth": 0, "role": "op_output", "slot": slot}
        build._rows["sites"].append(row | {"op": op, "op_nth": op_nth})
        build.value(site, [1.0 + site], call=call, op_id=site)

    found = history(build.data(), "max", path="fc", role="op_output")
    assert found.sites == ("fc/aten.split[0]", "fc/aten.split[1]", "fc/aten.relu", "fc/aten.relu@1")
    assert found.values.tolist() == [[1.0, 2.0, 3.0, 4.0]]


def test_a_module_that_ran_first_in_a_backward_stands_where_its_forward_does() -> None:
    build, net = typed_net(100)
    late, early = build.module("late", "Linear", parent=net), build.module("early", "Linear", parent=net)
    build.call(late, 0, 5, phase="backward")  # a custom Function's backward has called it
    for module, begin in ((early, 10), (late, 20)):
        build.output(build.call(module, begin, begin + 5, nth=0), [1.0])

    assert history(build.data()).sites == ("early", "late")


def test_a_parameter_that_no_module_owns_is_not_meant_by_the_path_of_the_root() -> None:
    build = RecordingBuilder()
    build.parameter(None, "alone", [1.0])

    with pytest.raises(ValueError, match=r"^path='' matches no module or parameter with role='parameter'"):
        history(build.data(), path="", role="parameter")


def test_of_many_steps_the_first_and_the_last_are_said() -> None:
    with pytest.raises(ValueError) as raised:
        history(typed_run(1, tuple(range(12))), steps=99)
    assert str(raised.value) == "step=99: nothing was measured there; there are: 0, 1, 2, 3, 4, 5, 6, …, 11"


def test_a_recording_whose_steps_were_held_and_never_written_says_why_it_is_empty() -> None:
    held = Note(step=7, kind=HELD, reason="no trigger fired")
    with pytest.raises(ValueError, match=r"^no values are in this recording: no trigger fired$"):
        history(RecordingBuilder(notes=(held,)).data())
