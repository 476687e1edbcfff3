"""Types steps of one small model."""

from typing import Any

from builders import RecordingBuilder
from modtrace.analysis.graph_view.records import ViewNode
from modtrace.api.model_graph import ModelGraph


def node(graph: ModelGraph, key: str) -> ViewNode:
    """The visible node of that key."""
    [found] = [each for each in graph.nodes if each.key == key]
    return found


def typed_net(end_ns: int | None = None, **more: Any) -> tuple[RecordingBuilder, int]:
    """A recording with a root, and with a step 0 that ends then; `more` are fields of `RunMeta`."""
    build = RecordingBuilder(**more)
    net = build.module("", "Net")
    if end_ns is not None:
        build.step(0, 0, end_ns)
    return build, net


def begin_net(
    end_ns: int = 1000, call_ends_ns: int = 900, nth: int | None = None
) -> tuple[RecordingBuilder, int, int]:
    """A recording with a root, a step 0 and a call of the root, which begins with the step."""
    build, net = typed_net(end_ns)
    return build, net, build.call(net, 0, call_ends_ns, nth=nth)


def run_op(
    build: RecordingBuilder, call: int | None, name: str, start_ns: int, *reads: int, **more: object
) -> int:
    """An op that reads tensors as `[0]`, `[1]` ..., and the tensor that it returns."""
    op = build.op(call, name, start_ns, start_ns + 5, **more)
    for at, each in enumerate(reads):
        build.use(each, op=op, slot=f"[{at}]")
    return build.tensor([2], producer=op)


def given_to(build: RecordingBuilder, net: int, slot: str = "[0]") -> int:
    """An input of the model."""
    return build.tensor([2], site=build.site(net, "input", slot))


def record_training() -> RecordingBuilder:
    """A forward, the loss, a backward of both, and an optimizer's step."""
    build, net, outer = begin_net()
    head = build.module("head", "Linear", parent=net)
    forward = build.call(head, 10, 50, parent=outer)
    given = given_to(build, net)
    weight = build.tensor([2], site=build.site(head, "parameter", "weight"))
    made = run_op(build, forward, "aten.mul.Tensor", 20, given, weight)
    build.use(made, call=outer, slot="output")
    loss = run_op(build, None, "aten.sum.default", 910, made)
    gradient = run_op(build, None, "aten.expand.default", 920, loss, phase="backward", forward=1)
    backward = build.backward(forward, 930, 960, parent=build.backward(outer, 925, 970))
    gradient = run_op(build, backward, "aten.mul.Tensor", 940, gradient, weight, forward=0)
    step = build.optimizer(980, 990)
    run_op(build, step, "aten.add_.Tensor", 981, weight, gradient)
    return build
