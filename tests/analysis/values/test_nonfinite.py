"""Where NaN and infinite values came up first, in recordings typed by hand."""

import math
from dataclasses import replace

import pytest

from builders import RecordingBuilder
from helpers.typed_steps import begin_net, typed_net
from modtrace.analysis.provenance.search import find_first
from modtrace.analysis.values.nonfinite import Measured, NonFinite, count_measured

nan, inf = math.nan, math.inf


def find_in(build: RecordingBuilder) -> NonFinite:
    found = find_first(build.data())
    assert found is not None
    return found


def test_first_is_by_step_and_order_and_has_everything_that_is_known() -> None:
    build, net = typed_net()
    head = build.module("head", "Linear", parent=net)
    build.step(6, 0, 100)
    build.output(build.call(net, 0, 90, nth=0), [1.0])
    build.step(7, 100, 200)
    outer = build.call(net, 100, 190, nth=0)
    build.call(head, 110, 120, parent=outer, nth=0)
    second = build.call(head, 130, 140, parent=outer, nth=1)
    build.output(outer, [nan], order=5)
    build.output(second, [1.0, nan, inf, inf], "['logits']", order=4)

    assert replace(find_in(build), remedy=None, after=None) == NonFinite(
        root="Net",
        path="head",
        call=1,
        op=None,
        phase="forward",
        step=7,
        role="output",
        slot="['logits']",
        kind=None,
        source=None,
        count=3,
        nan_count=1,
        inf_count=2,
        numel=4,
        inputs=(),
        chain=(),
        hint=None,
    )


def test_of_tensors_that_share_a_measurement_the_childs_is_found() -> None:
    build, net, outer = begin_net(100, 90)
    head = build.module("head", "Linear", parent=net)
    build.output(build.call(head, 10, 20, parent=outer), [nan], order=0)
    build.output(outer, [nan], order=0)

    assert find_in(build).path == "head"


@pytest.mark.parametrize("numbers", [[1.0, -2.0], []])
def test_finite_and_empty_tensors_are_not_found(numbers: list[float]) -> None:
    build = RecordingBuilder()
    build.step(0, 0, 100)
    build.output(build.call(build.module("", "Net"), 0, 90), numbers)

    assert find_first(build.data()) is None


def test_recording_without_values_has_none() -> None:
    assert count_measured(RecordingBuilder().data()) == Measured(
        tensors=0, unmeasured=0, steps=0, last_step=None
    )


def test_shared_module_is_named_as_the_caller_knows_it() -> None:
    build = RecordingBuilder()
    net = build.module("", "Net", name="student")
    build.module("x", "Half", parent=net)
    shared = build.module("x.l", "Linear", parent=1, aliases=["y.l"])
    y = build.module("y", "Half", parent=net)
    build.step(0, 0, 1000)
    in_y = build.call(shared, 10, 30, parent=build.call(y, 0, 100, parent=build.call(net, 0, 200)))
    again = build.recompute(in_y, 300, 325)
    build.output(again, [nan])

    found = find_in(build)
    assert (found.root, found.path, found.phase) == ("student", "y.l", "recompute")


def test_parameter_is_its_own_source() -> None:
    build, net = typed_net(100)
    layer = build.module("layers.3", "Linear", parent=net)
    build.parameter(layer, "weight", [1.0, inf])

    found = find_in(build)
    assert (found.path, found.call, found.slot, found.source) == (
        "layers.3",
        None,
        "weight",
        "layers.3.weight",
    )
    assert found.hint is None


def test_parameter_that_no_module_owns_has_no_path() -> None:
    build = RecordingBuilder()
    build.step(0, 0, 100)
    build.parameter(None, "param_groups[0].params[3]", [nan])

    found = find_in(build)
    assert (found.root, found.path, found.source) == (None, None, "param_groups[0].params[3]")


def test_gradient_of_a_parameter_has_no_source() -> None:
    build = RecordingBuilder()
    build.step(0, 0, 100)
    build.parameter_grad(build.module("", "Net"), "weight", [nan])

    assert (find_in(build).role, find_in(build).source) == ("parameter_grad", None)


def test_weights_that_were_not_finite_are_hinted_at() -> None:
    build, net = typed_net(100)
    wrapper = build.module("fc", "CheckpointWrapper", parent=net)
    layer = build.module("fc", "Linear", parent=wrapper, raw_path="fc._checkpoint_wrapped_module")
    other = build.module("other", "Linear", parent=net)
    build.output(build.call(wrapper, 0, 50), [nan])
    build.parameter(layer, "weight", [nan, nan, nan])
    build.parameter(layer, "bias", [1.0])
    build.parameter(layer, "scale", [inf, nan])
    build.parameter(other, "weight", [nan])
    build.step(1, 100, 200)
    build.parameter(layer, "bias", [nan])

    assert find_in(build).hint == (
        "the weights it used hold non-finite values: fc.weight (3 NaN), fc.scale (1 NaN, 1 inf)"
    )


def test_hint_names_three_weights_and_counts_the_rest() -> None:
    build, net = typed_net(100)
    build.output(build.call(net, 0, 50), [nan])
    for name in "abcde":
        build.parameter(net, name, [nan])

    assert find_in(build).hint == (
        "the weights it used hold non-finite values: a (1 NaN), b (1 NaN), c (1 NaN) and 2 more"
    )


def test_call_that_is_not_in_the_recording_leaves_the_modules_own_path() -> None:
    build, net = typed_net(100)
    head = build.module("head", "Linear", parent=net, aliases=["tail"])
    build.value(build.site(head, "output", nth=0), [nan], call=77)

    assert find_in(build).path == "head"


def test_module_and_site_that_are_not_in_the_recording_are_unknown() -> None:
    build = RecordingBuilder()
    build.step(0, 0, 100)
    build.value(build.site(5, "output"), [nan], phase=None)
    assert (find_in(build).path, find_in(build).phase) == ("(unknown#5)", None)

    build = RecordingBuilder()
    build.value(9, [nan])
    assert (find_in(build).path, find_in(build).role, find_in(build).count) == (None, None, 1)


def test_measured_and_unmeasured_tensors_are_counted() -> None:
    build, net = typed_net()
    for step in (3, 4):
        build.step(step, 0, 100)
        build.output(build.call(net, 0, 50), [1.0])
    build.output(0, None, note="meta tensor")
    build.output(
        0, None, note="not measured: nothing has been written to it yet"
    )  # there is nothing to measure
    build.output(0, [])
    build.step(5, 100, 200)

    assert count_measured(build.data()) == Measured(
        tensors=3, unmeasured=1, steps=2, last_step=4, recorded_steps=3
    )
