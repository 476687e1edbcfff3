"""The edges of graphs of real programs that write in place and through views, stated by hand."""

import re
from collections.abc import Callable

import torch

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


def test_chain():
    def run():
        x = torch.ones(4)
        y = x * 2
        (y + x).sum()

    assert edges(run) == [
        "ones -> mul (self)",
        "mul -> add (self)",
        "ones -> add (other)",
        "add -> sum (self)",
    ]


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


def test_write_through_a_transpose():
    def run():
        x = torch.ones(2, 3)
        x.t().relu_()
        x.sum()

    graph = drawn(run)
    assert edges(graph) == ["ones -> t (self)", "t -> relu_ (self)", "relu_ -> sum (self)"]
    assert edges(graph.without_views()) == ["ones -> relu_ (self)", "relu_ -> sum (self)"]


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
