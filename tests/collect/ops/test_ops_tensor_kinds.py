"""What a recording says of tensors that are not plain: expanded, conjugate, sparse, empty, made inside of a model."""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from collect.ops.test_ops_tensors import edges, op_rows, recorded


def row_of(run: Callable[[], object], op: str, *names: str) -> list[tuple[Any, ...]]:
    """What the table `tensors` says of what the first op of a name returned."""
    rec = recorded(run)
    made = next(row["op_id"] for row in op_rows(rec) if row["name"] == op)
    rows = [row for row in rec.table("tensors").to_pylist() if row["producer_op"] == made]
    return [tuple(row[name] for name in names) for row in rows]


def test_expanded_tensor_has_stride_0():
    found = row_of(
        lambda: torch.ones(1).expand(3) * 2, "aten.expand.default", "shape", "stride", "offset", "dtype"
    )
    assert found == [([3], [0], 0, "float32")]


def test_conjugate_and_negated_views_say_so():
    def run():
        x = torch.ones(2, dtype=torch.complex64)
        x.conj().imag * 2

    names = ("shape", "stride", "dtype", "conj", "neg")
    assert row_of(run, "aten._conj.default", *names) == [([2], [1], "complex64", True, False)]
    assert row_of(run, "aten._neg_view.default", *names) == [([2, 2], [2, 1], "float32", False, True)]


def test_conjugates_met_after_plain_tensors_of_the_same_shape_are_told_apart():
    def run():
        plain = torch.ones(2)
        plain * 2
        x = torch.ones(2, dtype=torch.complex64)
        y = x.conj()
        torch.view_as_real(x) + 1
        torch.view_as_real(y.conj()) + 1
        y.resolve_conj()

    rec = recorded(run)
    conj = [row["conj"] for row in rec.table("tensors").to_pylist() if row["dtype"] == "complex64"]
    assert conj == [False, True, False, False]


def test_sparse_tensor_has_no_storage_and_no_stride():
    def run():
        (torch.eye(2).to_sparse() * 2).to_dense()

    names = ("shape", "stride", "layout", "storage", "version", "slot")
    assert row_of(run, "aten.mul.Tensor", *names) == [([2, 2], [], "sparse_coo", None, None, "")]
    assert edges(run) == [
        "0 eye.default()",
        "1 _to_sparse.default(self=0)",
        "2 mul.Tensor(self=leaf0)",
        "3 _to_dense.default(self=leaf1)",
    ]


def test_tensors_of_no_dimension_and_of_no_element():
    def run():
        torch.ones(()) * 2
        e, f = torch.empty(0), torch.empty(0)
        (e + f).view(0, 1) * 1

    assert edges(run) == [
        "0 ones.default()",
        "1 mul.Tensor(self=0)",
        "2 empty.memory_format()",
        "3 empty.memory_format()",
        "4 add.Tensor(self=2, other=3)",
        "5 view.default(self=4)",
        "6 mul.Tensor(self=5)",
    ]
    assert row_of(run, "aten.view.default", "shape", "stride") == [([0, 1], [1, 1])]


def test_tensors_and_constants_made_inside_of_a_model():
    class Adding(nn.Module):
        def forward(self, x):
            return x + torch.tensor([1.0, 2.0]) + torch.arange(2)

    def run():
        Adding()(torch.ones(2))

    assert edges(run) == [
        "0 ones.default()",
        "1 lift_fresh.default(self=leaf0)",
        "2 add.Tensor(self=0, other=leaf0)",
        "3 arange.default()",
        "4 add.Tensor(self=2, other=3)",
    ]


def test_outputs_of_an_op_that_may_be_none_keep_their_slots():
    layer = nn.Linear(2, 2)

    def run():
        y = F.layer_norm(layer(torch.ones(3, 2)), (2,), torch.ones(2), torch.ones(2))
        y.sum().backward()

    slots = row_of(run, "aten.native_layer_norm.default", "slot", "shape")
    assert slots == [("[0]", [3, 2]), ("[1]", [3, 1]), ("[2]", [3, 1])]


def test_outputs_require_grad_once_they_are_read():
    def run():
        x = torch.ones(2, requires_grad=True)
        (x * 2).detach() * 3

    assert row_of(run, "aten.ones.default", "requires_grad") == [(True,)]
    assert row_of(run, "aten.detach.default", "requires_grad") == [(False,)]
