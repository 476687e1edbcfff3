"""Ops in the order in which they ran, with their modules."""

import pytest

from builders import RecordingBuilder, TypedRecording
from helpers.typed_steps import begin_net, typed_net
from modtrace.analysis.ops.op_paths import OpPath, build_op_paths


def training_step() -> TypedRecording:
    """conv1 twice, a relu, something of the net's own and a loss; then the backward of the first conv1."""
    build, net = typed_net(1_000, argv=("train.py",))
    conv, relu = build.module("conv1", "Conv2d", parent=net), build.module("relu", "ReLU", parent=net)
    outer = build.call(net, 0, 300, nth=0)
    first = build.call(conv, 10, 50, parent=outer, nth=0)
    second = build.call(conv, 60, 90, parent=outer, nth=1)
    rectified = build.call(relu, 100, 130, parent=outer, nth=0)
    build.op(second, "aten.convolution.default", 61, 80)
    build.op(first, "aten.convolution.default", 11, 40)
    build.op(rectified, "aten.relu.default", 101, 120)
    build.op(rectified, "aten.detach.default", 121, 122)
    build.op(rectified, "aten.detach.default", 123, 124)
    build.op(outer, "aten.view.default", 140, 150)
    build.op(None, "aten.mean.default", 310, 320)
    build.op(build.backward(first, 400, 500), "aten.convolution_backward.default", 410, 450)
    build.op(None, "aten.add_.Tensor", 460, 470, phase="backward")
    build.op(build.optimizer(600, 700), "aten.add_.Tensor", 610, 620)
    return build.data()


def test_ops_come_in_the_order_of_their_beginning_with_their_calls() -> None:
    outside = "(outside of modules)"
    assert build_op_paths(training_step()).rows == (
        OpPath("aten.convolution.default", 0, "conv1", "conv1", 0, "Net", "Conv2d", "forward"),
        OpPath("aten.convolution.default", 0, "conv1@1", "conv1", 1, "Net", "Conv2d", "forward"),
        OpPath("aten.relu.default", 0, "relu", "relu", 0, "Net", "ReLU", "forward"),
        OpPath("aten.detach.default", 0, "relu", "relu", 0, "Net", "ReLU", "forward"),
        OpPath("aten.detach.default", 1, "relu", "relu", 0, "Net", "ReLU", "forward"),
        OpPath("aten.view.default", 0, "Net", "", 0, "Net", "Net", "forward"),
        OpPath("aten.mean.default", 0, outside, None, None, None, None, None),
        OpPath("aten.convolution_backward.default", 0, "conv1", "conv1", 0, "Net", "Conv2d", "backward"),
        OpPath("aten.add_.Tensor", 0, outside, None, None, None, None, "backward"),
        OpPath("aten.add_.Tensor", 0, "(optimizer)", None, None, None, None, "optimizer"),
    )


def test_modules_are_named_once_for_ops_in_a_row() -> None:
    assert build_op_paths(training_step(), phase="forward").modules() == ("conv1", "relu", "")
    assert build_op_paths(training_step()).modules() == ("conv1", "relu", "", "conv1")


def test_ops_that_began_at_once_come_by_id() -> None:
    build = RecordingBuilder()
    build.step(0, 0, 100)
    call = build.call(build.module("", "Net"), 0, 10)
    for name in "bac":
        build.op(call, name, 5, 6)

    assert [row.op for row in build_op_paths(build.data()).rows] == ["b", "a", "c"]


def test_call_whose_number_is_not_known_is_named_by_its_path() -> None:
    build = RecordingBuilder()
    build.step(0, 0, 100)
    build.op(build.call(build.module("", "Net"), 0, 10), "aten.mm.default", 5, 6)

    [row] = build_op_paths(build.data()).rows
    assert (row.name, row.path, row.call) == ("Net", "", None)


def test_shared_module_stands_where_it_was_called() -> None:
    build, net, outer = begin_net(100, 90)
    x, y = (build.module(path, "Branch", parent=net) for path in "xy")
    shared = build.module("x.fc", "Linear", parent=x, aliases=["y.fc"])
    for nth, (branch, start_ns) in enumerate([(x, 10), (y, 40)]):
        around = build.call(branch, start_ns, start_ns + 20, parent=outer)
        call = build.call(shared, start_ns + 1, start_ns + 10, parent=around, nth=nth)
        build.op(call, "aten.addmm.default", start_ns + 2, start_ns + 5)

    assert build_op_paths(build.data()).modules() == ("x.fc", "y.fc")


def test_recording_without_ops_says_so() -> None:
    paths = build_op_paths(RecordingBuilder().data())
    assert (paths.rows, paths.recorded, paths.step) == ((), False, None)


def test_unknown_step_and_phase_are_refused() -> None:
    with pytest.raises(ValueError, match=r"^no step 9 in this recording; there are: 0$"):
        build_op_paths(training_step(), step=9)
    with pytest.raises(ValueError, match=r"^no phase 'fwd'; there are: "):
        build_op_paths(training_step(), phase="fwd")
