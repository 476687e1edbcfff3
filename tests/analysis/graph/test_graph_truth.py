"""The edges of graphs of real programs that write in place and through views, stated by hand."""

import re
from collections.abc import Callable
from itertools import pairwise

import numpy as np
import pytest
import torch
from torch import nn

from collect.ops.test_ops_tensors import recorded
from helpers.typed_graphs import edge_lines
from modtrace.api.graph import graph_of
from modtrace.api.model_graph import ModelGraph


def drawn(run: Callable[[], object]) -> ModelGraph:
    """The graph of a run."""
    return graph_of(recorded(run).data)


def edges(found: ModelGraph | Callable[[], object]) -> list[str]:
    """Its edges, such as `ones -> add_ (self)`: ops outside of modules without their namespace and overload."""
    graph = found if isinstance(found, ModelGraph) else drawn(found)
    return [re.sub(r"outside/aten\.(\w+)\.\w+", r"\1", each) for each in edge_lines(graph)]


def test_ops_in_place_make_what_is_read_after_them():
    def run():
        x = torch.ones(4)
        y = x * 2
        x.mul_(3)
        z = x + y
        x.add_(y)
        x - z

    assert edges(run) == [
        "ones -> mul (self)",
        "ones -> mul_ (self)",
        "mul_ -> add (self)",
        "mul -> add (other)",
        "mul_ -> add_ (self)",
        "mul -> add_ (other)",
        "add_ -> sub (self)",
        "add -> sub (other)",
    ]


def test_write_into_a_column():
    def run():
        x = torch.ones(2, 3)
        x[:, 0] *= 2
        x.sum()

    graph = drawn(run)
    # Python takes the column, multiplies it, and writes it back: the column is selected twice.
    assert edges(graph) == [
        "ones -> select (self)",
        "select -> mul_ (self)",
        "mul_ -> select#1 (self)",
        "select#1 -> copy_ (self)",
        "mul_ -> copy_ (src)",
        "copy_ -> sum (self)",
    ]
    assert edges(graph.without_views()) == [
        "ones -> mul_ (self)",
        "mul_ -> copy_ (self) ×2",
        "copy_ -> sum (self)",
    ]


def test_write_through_a_view_of_a_view():
    def run():
        x = torch.ones(2, 3)
        x.view(-1)[0].zero_()
        x.sum()

    graph = drawn(run)
    assert edges(graph) == [
        "ones -> view (self)",
        "view -> select (self)",
        "select -> zero_ (self)",
        "zero_ -> sum (self)",
    ]
    assert edges(graph.without_views()) == ["ones -> zero_ (self)", "zero_ -> sum (self)"]


def test_write_into_the_whole_is_read_through_a_view_made_before():
    def run():
        x = torch.ones(4)
        part = x[1:]
        x.mul_(2)
        part + 1
        x - 1

    assert edges(run) == [
        "ones -> slice (self)",
        "ones -> mul_ (self)",
        "mul_ -> add (self)",
        "mul_ -> sub (self)",
    ]


def test_write_through_one_view_is_read_through_another():
    def run():
        x = torch.ones(2, 3)
        row, column = x[0], x[:, 0]
        row.mul_(2)
        column + 1

    assert edges(run) == [
        "ones -> select (self)",
        "ones -> select#1 (self)",
        "select -> mul_ (self)",
        "mul_ -> add (self)",
    ]


def test_parts_are_written_one_after_the_other():
    def run():
        x = torch.ones(4)
        x[1:3] = torch.zeros(2)
        x[0] = 5.0
        x * 1

    assert edges(run) == [
        "ones -> slice (self)",
        "slice -> copy_ (self)",
        "zeros -> copy_ (src)",
        "constant:constant -> lift_fresh (self)",  # the number 5
        "copy_ -> select (self)",
        "select -> copy_#1 (self)",
        "constant:constant -> copy_#1 (src)",
        "copy_#1 -> mul (self)",
    ]


def test_out_makes_what_it_is_given():
    def run():
        x, y, z = torch.ones(4), torch.empty(4), torch.empty(2, 4)
        torch.add(x, x, out=y)
        torch.sub(y, x, out=z[0])
        z * 2

    assert edges(run) == [
        "ones -> add (self) ×2",
        "empty -> add (out)",
        "empty#1 -> select (self)",
        "add -> sub (self)",
        "ones -> sub (other)",
        "select -> sub (out)",
        "sub -> mul (self)",
    ]


def test_out_that_is_also_read():
    def run():
        x = torch.ones(4)
        torch.add(x, x, out=x)
        x * 2

    graph = drawn(run)
    assert edges(graph) == ["ones -> add (self) ×3", "add -> mul (self)"]
    assert all_slots(graph) == ["self", "other", "out", "self"]


def all_slots(graph: ModelGraph) -> list[str]:
    """The argument of each edge, also of those between the same two nodes."""
    return [graph.columns.edges.slots[each] for each in graph.columns.edges.slot.tolist()]


# Where memory is set, resized, exchanged, shared, or written to by an optimizer.


def test_tensor_that_is_set_to_another_ones_memory_is_that_one():
    def run():
        x, y = torch.ones(4), torch.zeros(2)
        y.set_(x)
        y * 2
        x.add_(3)
        y - 2

    assert edges(run) == [
        "zeros -> set_ (self)",
        "ones -> set_ (source)",
        "set_ -> mul (self)",
        "ones -> add_ (self)",
        "add_ -> sub (self)",
    ]


def test_tensor_that_is_set_to_show_memory_otherwise():
    def run():
        x, y = torch.ones(4), torch.zeros(2)
        y.set_(x.untyped_storage(), 0, (2, 2))
        y * 2

    assert edges(run) == ["zeros -> set_ (self)", "set_ -> mul (self)"]


def test_tensor_that_is_turned_in_place():
    def run():
        x = torch.ones(2, 3)
        x.t_()
        x * 2
        x.unsqueeze_(0)
        x + 2

    assert edges(run) == [
        "ones -> t_ (self)",
        "t_ -> mul (self)",
        "t_ -> unsqueeze_ (self)",
        "unsqueeze_ -> add (self)",
    ]


def test_resized_tensor_is_made_by_the_resizing():
    def run():
        x = torch.ones(4)
        x.resize_(2)
        x * 2
        x.resize_(8)
        x + 2

    graph = drawn(run)
    expected = [
        "ones -> resize_ (self)",
        "resize_ -> mul (self)",
        "resize_ -> resize_#1 (self)",
        "resize_#1 -> add (self)",
    ]
    assert edges(graph) == expected
    assert edges(graph.without_views()) == expected  # what was there may be another size: no view


def test_memory_freed_and_allocated_again_under_a_tensor_is_the_same():
    def run():
        x = torch.ones(4) * 1
        x.untyped_storage().resize_(0)
        x.untyped_storage().resize_(16)
        x.fill_(2)
        x + 1

    assert edges(run) == ["ones -> mul (self)", "mul -> fill_ (self)", "fill_ -> add (self)"]


def test_views_that_show_all_are_told_apart():
    def run():
        x = torch.ones(4)
        y, z = x.detach(), x.view(4)
        y * 2
        z + 2
        x - 2

    graph = drawn(run)
    assert edges(graph) == [
        "ones -> detach (self)",
        "ones -> view (self)",
        "detach -> mul (self)",
        "view -> add (self)",
        "ones -> sub (self)",
    ]
    assert edges(graph.without_views()) == ["ones -> mul (self)", "ones -> add (self)", "ones -> sub (self)"]


def test_every_one_of_sixty_parts_comes_from_its_op():
    graph = drawn(lambda: torch.stack(list(torch.ones(60).unbind())))
    assert edges(graph) == ["ones -> unbind (self)", "unbind -> stack (tensors[0]) ×60"]
    nodes, found, tensors = graph.columns.nodes, graph.columns.edges, graph.columns.tensors
    read = found.tensor[nodes.order[found.target] == nodes.order.max()]
    assert [tensors.slots[each] for each in tensors.slot[read].tolist()] == [f"[{at}]" for at in range(60)]


def test_more_parts_than_are_told_apart_come_from_what_made_the_whole():
    assert edges(lambda: torch.stack(list(torch.ones(100).unbind()))) == [
        "ones -> unbind (self)",
        "ones -> stack (tensors[0]) ×100",
    ]


def test_storages_that_take_each_others_place_are_told_apart():
    def run():
        x = torch.ones(4)
        for _ in range(50):
            x = (x * 2) + 1

    chain = ["ones", *(f"{name}{f'#{at}' if at else ''}" for at in range(50) for name in ("mul", "add"))]
    assert edges(run) == [f"{one} -> {other} (self)" for one, other in pairwise(chain)]


def test_data_that_are_exchanged_are_the_new_ones():
    parameter = nn.Parameter(torch.ones(2))

    def run():
        parameter * 2
        parameter.data = torch.zeros(2)
        parameter + 2
        parameter.data.mul_(3)
        parameter - 2

    assert edges(run) == [
        "constant:constant -> mul (self)",
        "zeros -> add (self)",
        "zeros -> detach (self)",
        "detach -> mul_ (self)",
        "mul_ -> sub (self)",
    ]


def test_swapped_tensors_are_each_other():
    def run():
        a, b = torch.ones(2), torch.zeros(2)
        torch.utils.swap_tensors(a, b)
        a * 2
        b + 3

    assert edges(run) == ["zeros -> mul (self)", "ones -> add (self)"]


def test_memory_shared_with_numpy_is_a_leaf_of_each_tensor_that_shows_it():
    memory = np.ones(2)
    a, b = torch.from_numpy(memory), torch.from_numpy(memory)

    def run():
        a.mul_(2)
        b + 2  # that it has been written to cannot be seen

    assert edges(run) == ["constant:constant -> mul_ (self)", "constant:constant~2 -> add (self)"]


def test_list_op_writes_to_each_of_its_tensors():
    def run():
        x, y = torch.ones(4), torch.zeros(4)
        torch._foreach_mul_([x[:1], y], 2)
        x + 1
        y - 1

    assert edges(run) == [
        "ones -> slice (self)",
        "slice -> _foreach_mul_ (self[0])",
        "zeros -> _foreach_mul_ (self[1])",
        "_foreach_mul_ -> add (self)",
        "_foreach_mul_ -> sub (self)",
    ]


@pytest.mark.parametrize(
    ("make", "writes"),
    [
        (lambda given: torch.optim.SGD(given, lr=0.1, foreach=False), "add_.Tensor"),
        (lambda given: torch.optim.AdamW(given, foreach=True), "_foreach_addcdiv_.ScalarList"),
        (lambda given: torch.optim.AdamW(given, fused=True), "_fused_adamw_.default"),
    ],
    ids=["one by one", "foreach", "fused"],
)
def test_weight_is_read_from_the_optimizer_that_wrote_it(
    make: Callable[[object], torch.optim.Optimizer], writes: str
):
    layer = nn.Linear(2, 2, bias=False)
    optimizer = make(layer.parameters())

    def run():
        layer(torch.ones(2, 2)).sum().backward()
        optimizer.step()
        layer.weight.abs()  # in the same step

    graph = drawn(run)
    [reader] = [at for at, each in enumerate(graph.nodes) if each.label == "abs"]
    assert sources(graph, reader) == [f"optimizer/step/aten.{writes}"]
    [first] = [at for at, each in enumerate(graph.nodes) if each.label == "t" and each.phase == "forward"]
    assert sources(graph, first) == ["parameter:weight"]


def sources(graph: ModelGraph, target: int) -> list[str]:
    """The keys of what a node reads."""
    return [graph.nodes[each.source].key for each in graph.edges if each.target == target]
