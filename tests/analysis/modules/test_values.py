"""The statistics at the nodes of the module tree."""

import math
from collections.abc import Sequence

from builders import RecordingBuilder, TypedRecording, raw_statistics
from helpers.typed_steps import begin_net, typed_net
from modtrace.analysis.modules.folding import fold
from modtrace.analysis.modules.module_tree import build_module_tree, iterate_nodes
from modtrace.analysis.modules.value_summary import NonFiniteCount, SlotValues, ValueSummary
from modtrace.recording.statistics.moments import Stats

nan, inf = math.nan, math.inf


def stats(*numbers: float) -> Stats:
    return Stats(**raw_statistics(numbers))


def summaries(data: TypedRecording, step: int | None = None) -> dict[str, ValueSummary | None]:
    """The summaries by path."""
    tree = build_module_tree(data, step=step)
    return {node.path: node.values for _, node in iterate_nodes(tree.roots)}


def summary_at(data: TypedRecording, path: str, step: int | None = None) -> ValueSummary:
    found = summaries(data, step)[path]
    assert found is not None
    return found


def test_module_has_the_statistics_of_its_outputs_gradients_and_parameters() -> None:
    build, net, outer = begin_net(100, 90, nth=0)
    head = build.module("head", "Linear", parent=net)
    first = build.call(head, 10, 20, parent=outer, nth=0)
    second = build.call(head, 30, 40, parent=outer, nth=1)
    build.output(first, [1.0, 2.0])
    build.output(second, [-3.0])
    build.gradient(second, [0.5])
    build.gradient(first, [0.25])
    build.parameter(head, "weight", [2.0, 2.0])
    build.parameter(head, "bias", [4.0])
    build.parameter_grad(head, "weight", [0.2, 0.2])
    build.parameter_grad(head, "bias", [0.4])

    found = summary_at(build.data(), "head")
    assert found == ValueSummary(
        output=stats(1.0, 2.0, -3.0),
        gradient=stats(0.5, 0.25),
        parameters=stats(2.0, 2.0, 4.0),
        parameter_gradients=stats(0.2, 0.2, 0.4),
        slots=(SlotValues(slot="", output=stats(1.0, 2.0, -3.0), gradient=stats(0.5, 0.25)),),
    )
    assert found.gradient_to_parameter is not None
    assert math.isclose(found.gradient_to_parameter, 0.1)


def test_slots_are_merged_and_kept_apart() -> None:
    build = RecordingBuilder()
    build.step(0, 0, 100)
    call = build.call(build.module("", "Net"), 0, 90, nth=0)
    build.output(call, [1.0], "['logits']")
    build.output(call, [5.0], "['loss']")
    build.gradient(call, [0.5], "['loss']")
    build.gradient(call, [0.1], "['aux']")

    found = summary_at(build.data(), "")
    assert (found.output, found.gradient) == (stats(1.0, 5.0), stats(0.5, 0.1))
    assert found.slots == (
        SlotValues(slot="['logits']", output=stats(1.0), gradient=None),
        SlotValues(slot="['loss']", output=stats(5.0), gradient=stats(0.5)),
        SlotValues(slot="['aux']", output=None, gradient=stats(0.1)),
    )


def test_parameters_inside_are_counted_once_where_they_are_tied() -> None:
    build, net, outer = begin_net(100, 90)
    left = build.module("left", "Linear", parent=net)
    right = build.module("right", "Linear", parent=net)
    build.call(left, 1, 2, parent=outer)
    build.call(right, 3, 4, parent=outer)
    build.parameter(net, "scale", [7.0])
    build.parameter(left, "weight", [1.0, 2.0], order=5)
    build.parameter(right, "weight", [1.0, 2.0], order=5)
    build.parameter(right, "bias", [3.0])

    found = summaries(build.data())
    assert [each.parameters for each in found.values() if each] == [
        stats(7.0, 1.0, 2.0, 3.0),
        stats(1.0, 2.0),
        stats(1.0, 2.0, 3.0),
    ]


def test_one_tensor_in_two_slots_is_counted_once() -> None:
    build = RecordingBuilder()
    build.step(0, 0, 100)
    call = build.call(build.module("", "Net"), 0, 90)
    build.output(call, [1.0], "[0]", order=0)
    build.output(call, [1.0], "[1]", order=0)

    assert summary_at(build.data(), "").output == stats(1.0)


def test_container_has_no_output_but_what_is_inside() -> None:
    build, net = typed_net(100)
    layers = build.module("layers", "ModuleList", parent=net)
    layer = build.module("layers.0", "Linear", parent=layers)
    build.output(build.call(layer, 1, 2, parent=build.call(net, 0, 90)), [nan, inf])
    build.parameter(layer, "weight", [1.0])

    found = summary_at(build.data(), "layers")
    assert found == ValueSummary(parameters=stats(1.0), nonfinite_inside=2)
    assert found.gradient_to_parameter is None


def test_what_is_not_finite_is_counted_at_the_module_and_around_it_once() -> None:
    build, net, outer = begin_net(100, 90)
    head = build.module("head", "Linear", parent=net)
    inner = build.call(head, 1, 2, parent=outer)
    build.output(inner, [nan, 1.0], order=0)
    build.output(outer, [nan, 1.0], order=0)
    build.gradient(outer, [inf, -inf, nan])
    build.parameter(head, "weight", [inf])
    build.parameter_grad(head, "weight", [nan, nan])

    assert summary_at(build.data(), "").nonfinite == (
        NonFiniteCount(kind="output", nan_count=1, inf_count=0),
        NonFiniteCount(kind="gradient", nan_count=1, inf_count=2),
    )
    assert summary_at(build.data(), "").nonfinite_inside == 4
    assert summary_at(build.data(), "head").nonfinite == (
        NonFiniteCount(kind="output", nan_count=1, inf_count=0),
        NonFiniteCount(kind="parameter", nan_count=0, inf_count=1),
        NonFiniteCount(kind="parameter gradient", nan_count=2, inf_count=0),
    )
    assert summary_at(build.data(), "head").nonfinite_inside == 0


def test_recomputed_outputs_are_not_merged_with_what_they_repeat() -> None:
    build = RecordingBuilder()
    build.step(0, 0, 100)
    call = build.call(build.module("", "Net"), 0, 30)
    build.output(call, [1.0])
    build.output(build.recompute(call, 40, 60), [nan])

    found = summary_at(build.data(), "")
    assert found.output == stats(1.0)
    assert found.nonfinite == (NonFiniteCount(kind="recomputed output", nan_count=1, inf_count=0),)


def test_shared_module_has_values_where_it_was_called_and_its_parameters_at_both() -> None:
    build, net, outer = begin_net()
    x = build.module("x", "Half", parent=net)
    shared = build.module("x.l", "Linear", parent=x, aliases=["y.l"])
    y = build.module("y", "Half", parent=net)
    build.output(build.call(shared, 10, 30, parent=build.call(x, 0, 100, parent=outer)), [1.0])
    build.output(build.call(shared, 210, 250, parent=build.call(y, 200, 300, parent=outer)), [2.0])
    build.parameter(shared, "weight", [3.0])

    found = summaries(build.data())
    assert {path: each.output for path, each in found.items() if each and each.output} == {
        "x.l": stats(1.0),
        "y.l": stats(2.0),
    }
    assert {each.parameters for each in found.values() if each} == {stats(3.0)}
    assert len(found) == 5


def test_gradients_of_an_earlier_steps_forward_are_shown_in_their_own_step() -> None:
    build, net = typed_net(100)
    head = build.module("head", "Linear", parent=net)
    call = build.call(head, 10, 30, parent=build.call(net, 0, 60))
    build.step(1, 100, 200)
    build.gradient(call, [0.5])
    build.optimizer(150, 160)

    assert summaries(build.data(), 0) == {"": None, "head": None}
    assert summary_at(build.data(), "head", 1).gradient == stats(0.5)


def test_parameters_of_a_module_that_was_not_called_count_around_it() -> None:
    build = RecordingBuilder()
    net = build.module("", "MultiheadAttention")
    unseen = build.module("out_proj", "Linear", parent=net)
    build.step(0, 0, 100)
    build.call(net, 0, 60)
    build.parameter(unseen, "weight", [1.0])
    assert summaries(build.data()) == {"": ValueSummary(parameters=stats(1.0))}

    build.parameter(unseen, "bias", [nan])
    assert summary_at(build.data(), "").nonfinite_inside == 1
    assert summary_at(build.data(), "out_proj").nonfinite[0].nan_count == 1


def test_wrapper_and_wrapped_share_their_statistics() -> None:
    build = RecordingBuilder()
    wrapper = build.module("", "DistributedDataParallel")
    net = build.module("", "Net", parent=wrapper, raw_path="module")
    build.step(0, 0, 100)
    outer = build.call(wrapper, 0, 60)
    build.output(build.call(net, 10, 50, parent=outer), [1.0], order=0)
    build.output(outer, [1.0], order=0)
    build.parameter(net, "weight", [2.0])

    assert summaries(build.data()) == {
        "": ValueSummary(
            output=stats(1.0),
            parameters=stats(2.0),
            slots=(SlotValues(slot="", output=stats(1.0), gradient=None),),
        )
    }


def test_tensors_that_were_not_measured_and_other_steps_are_left_out() -> None:
    build, net = typed_net(100)
    build.output(build.call(net, 0, 60), [9.0])
    build.step(1, 100, 200)
    call = build.call(net, 100, 160)
    build.output(call, None, note="meta tensor")
    build.value(build.site(net, "input"), [5.0], call=call)
    build.value(77, [5.0], call=call)
    build.parameter(None, "param_groups[0].params[3]", [nan])

    assert summaries(build.data()) == {"": None}


def test_folded_siblings_have_merged_statistics() -> None:
    def outputs(index: int) -> Sequence[float]:
        return [nan, float(index)]

    build, net, outer = begin_net()
    for index in range(4):
        block = build.module(str(index), "Block", parent=net)
        linear = build.module(f"{index}.fc", "Linear", parent=block)
        call = build.call(block, 10, 20, parent=outer)
        build.output(build.call(linear, 11, 12, parent=call), outputs(index))
        build.parameter(linear, "weight", [float(index)])

    tree = fold(build_module_tree(build.data()))
    found = {node.path: node.values for _, node in iterate_nodes(tree.roots)}
    assert found["3"] == ValueSummary(parameters=stats(3.0), nonfinite_inside=1)
    inside = found["0..3.fc"]
    assert inside is not None and inside.output is not None
    assert (inside.output.count, inside.output.nan_count) == (8, 4)
    assert inside.parameters == stats(0.0, 1.0, 2.0, 3.0)
    assert inside.nonfinite == (NonFiniteCount(kind="output", nan_count=4, inf_count=0),)
    assert [slot.slot for slot in inside.slots] == [""]
