"""Which forward op has made the node that a backward op works for, and what the engine adds, by hand."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from collect.ops.test_ops_steps import layer, recorded
from collect.ops.test_ops_tensors import op_rows


def forward_ops(run: Callable[[], object]) -> list[tuple[str, str | None]]:
    """For each backward op its name and that of its forward op. A module runs first, so that there is a step."""
    opening = layer()

    def whole(rec):
        opening(torch.ones(1, 2))
        run()

    rows = {row["op_id"]: row for row in op_rows(recorded(whole))}
    return [
        (short(row), short(rows[row["forward_op_id"]]) if row["forward_op_id"] is not None else None)
        for row in rows.values()
        if row["phase"] == "backward"
    ]


def short(row: dict[str, Any]) -> str:
    name: str = row["name"]
    return name.removeprefix("aten.").removesuffix(".default")


@pytest.fixture
def tripled() -> Callable[[torch.Tensor], Any]:
    """Applies a Function that runs no op in its forward."""
    constant = torch.ones(2)

    class Tripled(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return constant

        @staticmethod
        def backward(ctx, grad):
            return grad * 3

    return Tripled.apply


def leaf() -> torch.Tensor:
    return torch.ones(2, requires_grad=True)


def test_backward_of_a_custom_function_has_no_forward_op(tripled):
    def run():
        (tripled(leaf()) * 2).sum().backward()

    assert forward_ops(run) == [
        ("expand", "sum"),
        ("mul.Tensor", None),  # two nodes were made since the last op, and it is not known which is whose
        ("mul.Tensor", None),
        ("detach", None),
    ]


def test_write_into_a_view_is_the_forward_op_of_both_its_nodes():
    def run():
        x = leaf() * 1
        x[:1].mul_(3)
        x.sum().backward()

    found = forward_ops(run)
    assert found[0] == ("expand", "sum")
    assert found[-2:] == [("mul.Tensor", "mul.Tensor"), ("detach", None)]
    assert {forward for _, forward in found[1:-2]} == {"mul_.Tensor"}


def test_op_on_a_list_is_the_forward_op_of_its_node():
    def run():
        x = leaf() * 1
        one, two = torch._foreach_mul([x, x], 2)
        (one + two).sum().backward()

    assert ("mul.Scalar", "_foreach_mul.Scalar") in forward_ops(run)


def test_double_backward_knows_the_ops_of_the_first_forward_alone():
    def run():
        x = leaf()
        y = (x * x).sum()
        (slope,) = torch.autograd.grad(y, x, create_graph=True)
        slope.square().sum().backward()

    found = forward_ops(run)
    assert {forward for _, forward in found} == {"sum", "mul.Tensor", "pow.Tensor_Scalar", None}


WRONG_NODE = "a node that was made between two ops is taken for that of the next one"


@pytest.mark.xfail(strict=True, reason=WRONG_NODE)
def test_view_of_what_was_written_to_does_not_take_the_node_of_the_next_op():
    def run():
        x = leaf() * 1
        part = x[:1]
        x.mul_(2)
        (part * 3).sum().backward()  # `part` gets a new node here, after that of this `mul`

    found = forward_ops(run)
    assert found[:2] == [("expand", "sum"), ("mul.Tensor", "mul.Tensor")]
    assert {forward for _, forward in found[2:6]} == {None}
    assert found[6:8] == [("mul.Tensor", "mul_.Tensor"), ("mul.Tensor", "mul.Tensor")]


def test_detach_of_what_is_saved_does_not_take_the_node_of_a_view():
    def run():
        (leaf() * 1).view(2, 1).relu_().sum().backward()

    found = {forward for _, forward in forward_ops(run)}
    assert "relu_" in found and "detach" not in found


def test_op_that_cannot_be_differentiated_has_no_node(tripled):
    def run(rec):
        torch.gt(tripled(leaf()), 0)

    assert [row["sequence_nr"] for row in op_rows(recorded(run))] == [None, None]


@pytest.mark.xfail(
    strict=True, reason="of an op on a list written in place only the last of its nodes is known"
)
def test_op_on_a_list_in_place_is_the_forward_op_of_all_its_nodes():
    def run():
        x, y = leaf() * 1, leaf() * 1
        torch._foreach_mul_([x, y], 2)
        (x + y).sum().backward()

    scaled = [forward for name, forward in forward_ops(run) if name == "mul.Scalar"]
    assert scaled == ["_foreach_mul_.Scalar", "_foreach_mul_.Scalar"]


# What the engine adds, and what users add.


def test_additions_of_the_engine_are_told_from_those_of_users():
    def run(rec):
        x = leaf()
        for _ in range(2):
            y = x * 2
            y.register_hook(lambda grad: grad + 1)
            (y + y * 3).sum().backward()

    rows = [row for row in op_rows(recorded(run, layer())) if row["phase"] == "backward"]
    assert [(short(row), row["accumulation"]) for row in rows if "add" in row["name"]] == [
        ("add.Tensor", True),  # the two gradients of `y`
        ("add.Tensor", False),  # the hook
        ("add.Tensor", True),
        ("add.Tensor", False),
        ("add_.Tensor", True),  # to the gradient of `x`
    ]


def test_additions_in_hooks_of_a_leaf_are_not_the_engines():
    def run(rec):
        x = leaf()
        x.register_hook(lambda grad: grad + 1)
        (x * 2).sum().backward()

    added = [row["accumulation"] for row in op_rows(recorded(run)) if row["name"] == "aten.add.Tensor"]
    assert added == [False]
