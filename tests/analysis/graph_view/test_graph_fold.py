"""Which siblings of an execution graph fold into one, and what is said of them then."""

from collections.abc import Callable
from typing import Any

import pytest

from builders import RecordingBuilder
from helpers.typed_graphs import box_lines, edge_lines, node_lines
from modtrace.api.graph import graph_of
from modtrace.api.model_graph import ModelGraph


class Blocks:
    """Types a model of numbered blocks, one after the other."""

    def __init__(self) -> None:
        self.build = RecordingBuilder()
        self.net = self.build.module("", "Net")
        self.list = self.build.module("blocks", "ModuleList", parent=self.net)
        self.build.step(0, 0, 100_000_000)
        self.outer = self.build.call(self.net, 0, 50_000_000)
        self.last = self.tensor("input", "[0]")
        self.calls: list[int] = []
        self.now = 0

    def tensor(self, role: str, slot: str, module: int | None = None) -> int:
        """A leaf."""
        return self.build.tensor(
            [2], site=self.build.site(self.net if module is None else module, role, slot)
        )

    def tick(self) -> int:
        self.now += 10
        return self.now

    def enter(self, type: str = "Block") -> tuple[int, int]:
        """The next block: its module and its call."""
        module = self.build.module(f"blocks.{len(self.calls)}", type, parent=self.list)
        call = self.build.call(module, self.tick(), 40_000_000, parent=self.outer)
        self.calls.append(call)
        return module, call

    def op(self, call: int | None, name: str, *reads: int, shape: tuple[int, ...] = (2,), **more: Any) -> int:
        """The tensor that an op returns."""
        start = self.tick()
        op = self.build.op(call, name, start, start + 5, **({"flops": 3, "bytes_read": 8} | more))
        for at, each in enumerate(reads):
            self.build.use(each, op=op, slot=f"[{at}]")
        return self.build.tensor(shape, producer=op)

    def block(self, name: str = "aten.mul.Tensor", *more: int, type: str = "Block", **options: Any) -> int:
        """A block of one op that reads what came before and a parameter."""
        module, call = self.enter(type)
        weight = self.tensor("parameter", "weight", module)
        self.last = self.op(call, name, self.last, weight, *more, **options)
        return self.last

    def backward(self, *, accumulates: bool = False) -> None:
        """A backward of all blocks, the last one first; the engine may run an op outside of modules behind each."""
        around = self.build.backward(self.outer, self.tick(), 90_000_000)
        gradient = self.op(None, "aten.ones_like.default", self.last)
        for each in reversed(self.calls):
            inner = self.build.backward(each, self.tick(), 80_000_000, parent=around)
            of_weight = self.op(inner, "aten.sum.default", gradient)
            gradient = self.op(inner, "aten.mul.Tensor", gradient)
            if accumulates:
                self.op(None, "aten.detach.default", of_weight, phase="backward")

    def folded(self) -> ModelGraph:
        return graph_of(self.build.data()).fold()


def block_boxes(graph: ModelGraph) -> list[str]:
    """The boxes of blocks, without what is around them."""
    return [each.strip() for each in box_lines(graph) if "/blocks." in each]


def test_blocks_that_are_alike_fold_and_what_they_cost_is_summed():
    blocks = Blocks()
    for _ in range(4):
        blocks.block()
    graph = blocks.folded()
    assert block_boxes(graph) == ["forward/Net/blocks.0 ×4"]
    assert node_lines(graph) == [
        "input:[0]",
        "parameter:blocks.0.weight ×4",
        "forward/Net/blocks.0/aten.mul.Tensor ×4",
    ]
    [op] = [each for each in graph.nodes if each.kind == "op"]
    assert (op.flops, op.bytes_read, op.duration_ns, op.ops) == (12, 32, 20, 4)
    closed = graph.collapse("blocks.*").nodes[-1]
    assert (closed.label, closed.repeats, closed.ops, closed.flops, closed.bytes_read) == (
        "0..3",
        4,
        4,
        12,
        32,
    )
    assert graph.unfold().view == graph_of(blocks.build.data()).view


#: The names of the tensors in what a call is given, and the nodes that are shown for them.
STRUCTURES: dict[str, tuple[list[str], list[str]]] = {
    "cache": (
        [f"['past'].layers[{layer}].{part}" for layer in range(12) for part in ("keys", "values")],
        ["input['past'].layers ×24"],
    ),
    "tuples": ([f"[1][{layer}][{part}]" for layer in range(2) for part in range(2)], ["input[1] ×4"]),
    "few": ([f"['states'][{at}]" for at in range(3)], [f"input['states'][{at}]" for at in range(3)]),
    "arguments": ([f"[{at}]" for at in range(1, 6)], [f"input[{at}]" for at in range(1, 6)]),
    "batch": (
        [f"[1]['{name}']" for name in ("ids", "mask", "labels", "types")],
        [f"input[1]['{name}']" for name in ("ids", "mask", "labels", "types")],
    ),
}


@pytest.mark.parametrize("name", STRUCTURES)
def test_the_tensors_of_a_structure_that_a_call_is_given_are_one_node(name: str):
    slots, shown = STRUCTURES[name]
    blocks = Blocks()
    given = [blocks.tensor("input", slot) for slot in slots]
    blocks.op(blocks.outer, "aten.cat.default", blocks.last, *given)
    graph = blocks.folded()
    labels = [f"{node.label} ×{node.repeats}".removesuffix(" ×1") for node in graph.nodes]
    assert labels == ["input[0]", *shown, "cat"]
    assert len(graph.unfold().nodes) == len(slots) + 2


def test_tensors_of_a_structure_with_another_shape_are_another_node():
    blocks = Blocks()
    site = [blocks.build.site(blocks.net, "input", f"['past'].layers[{layer}]") for layer in range(8)]
    given = [blocks.build.tensor([3 if at % 2 else 2], site=one) for at, one in enumerate(site)]
    blocks.op(blocks.outer, "aten.cat.default", *given)
    shown = [(node.label, node.repeats, node.shape) for node in blocks.folded().nodes if node.kind == "input"]
    assert shown == [("input['past'].layers", 4, (2,)), ("input['past'].layers", 4, (3,))]


def test_blocks_fold_in_backward_where_the_last_one_comes_first_although_gradients_are_accumulated_between_them():
    blocks = Blocks()
    for _ in range(3):
        blocks.block()
    blocks.backward(accumulates=True)
    assert block_boxes(blocks.folded()) == ["forward/Net/blocks.0 ×3", "backward/Net/blocks.2 ×3"]


def another_op(blocks: Blocks) -> None:
    blocks.block("aten.div.Tensor")


def another_shape(blocks: Blocks) -> None:
    blocks.block(shape=(3,))


def another_type(blocks: Blocks) -> None:
    blocks.block(type="LargeBlock")


def another_parameter(blocks: Blocks) -> None:
    module, call = blocks.enter()
    weight, bias = (blocks.tensor("parameter", each, module) for each in ("weight", "bias"))
    blocks.last = blocks.op(call, "aten.mul.Tensor", blocks.last, weight, bias)


def another_name_of_a_parameter(blocks: Blocks) -> None:
    module, call = blocks.enter()
    blocks.last = blocks.op(call, "aten.mul.Tensor", blocks.last, blocks.tensor("parameter", "scale", module))


def another_edge_inside(blocks: Blocks) -> None:
    module, call = blocks.enter()
    weight = blocks.tensor("parameter", "weight", module)
    blocks.last = blocks.op(call, "aten.mul.Tensor", weight, blocks.last)


@pytest.mark.parametrize(
    "unlike",
    [
        another_op,
        another_shape,
        another_type,
        another_parameter,
        another_name_of_a_parameter,
        another_edge_inside,
    ],
)
def test_block_that_is_not_like_the_others_stays(unlike: Callable[[Blocks], None]):
    blocks = Blocks()
    blocks.block()
    blocks.block()
    unlike(blocks)
    blocks.block()
    blocks.block()
    assert block_boxes(blocks.folded()) == [
        "forward/Net/blocks.0 ×2",
        "forward/Net/blocks.2",
        "forward/Net/blocks.3 ×2",
    ]


def test_ops_of_other_libraries_are_told_apart():
    blocks = Blocks()
    blocks.block("mylib.forward.default")
    blocks.block("mylib.backward.default")
    assert block_boxes(blocks.folded()) == ["forward/Net/blocks.0", "forward/Net/blocks.1"]


def test_op_between_two_blocks_that_leads_from_one_to_the_other_forbids_folding():
    blocks = Blocks()
    for _ in range(3):
        before = blocks.last
        blocks.last = blocks.op(blocks.outer, "aten.add.Tensor", before, blocks.block())
    assert block_boxes(blocks.folded()) == [
        "forward/Net/blocks.0",
        "forward/Net/blocks.1",
        "forward/Net/blocks.2",
    ]


def test_mask_that_all_blocks_read_does_not_forbid_folding():
    blocks = Blocks()
    mask = blocks.op(blocks.outer, "aten.triu.default", blocks.last)
    for _ in range(3):
        blocks.block("aten.where.self", mask, blocks.tensor("input", "positions"))
    assert block_boxes(blocks.folded()) == ["forward/Net/blocks.0 ×3"]


def test_results_that_are_read_at_the_end_do_not_forbid_folding():
    blocks = Blocks()
    kept = [blocks.block() for _ in range(3)]
    blocks.op(blocks.outer, "aten.cat.default", *kept)
    assert block_boxes(blocks.folded()) == ["forward/Net/blocks.0 ×3"]
    assert edge_lines(blocks.folded())[-1] == (
        "forward/Net/blocks.0/aten.mul.Tensor -> forward/Net/aten.cat.default ([0]) ×3"
    )


def test_blocks_inside_of_blocks_fold_too():
    blocks = Blocks()
    for _ in range(2):
        module, call = blocks.enter()
        for at in range(3):
            part = blocks.build.module(f"blocks.{len(blocks.calls) - 1}.{at}", "Linear", parent=module)
            inner = blocks.build.call(part, blocks.tick(), 30_000_000, parent=call)
            blocks.last = blocks.op(inner, "aten.relu.default", blocks.last)
    graph = blocks.folded()
    assert block_boxes(graph) == ["forward/Net/blocks.0 ×2", "forward/Net/blocks.0.0 ×6"]
    assert [each.flops for each in graph.nodes] == [0, 18]
    assert [each.flops for each in graph.collapse("blocks.*").nodes] == [0, 18]


def test_blocks_called_twice_fold_in_each_round():
    blocks = Blocks()
    for _ in range(2):
        blocks.block()
    modules = [each["module_id"] for each in blocks.build.data().table("modules").to_pylist()[2:]]
    weights = [1, 3]
    for module, weight in zip(modules, weights, strict=True):
        call = blocks.build.call(module, blocks.tick(), 40_000_000, parent=blocks.outer, nth=1)
        blocks.last = blocks.op(call, "aten.mul.Tensor", blocks.last, weight)
    assert block_boxes(blocks.folded()) == ["forward/Net/blocks.0 ×2", "forward/Net/blocks.0@1 ×2"]


def test_two_hundred_blocks_are_one():
    blocks = Blocks()
    for _ in range(200):
        blocks.block()
    blocks.backward()
    assert block_boxes(blocks.folded()) == ["forward/Net/blocks.0 ×200", "backward/Net/blocks.199 ×200"]
