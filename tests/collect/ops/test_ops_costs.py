"""What ops cost: operations and bytes counted by hand, which of them are views, and when they ran."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import modtrace
from collect.ops.test_ops_tensors import op_rows, recorded
from zoo import TiedGPT


def one(run: Callable[[], object], op: str) -> dict[str, Any]:
    """The row of the only op of a name."""
    [row] = [row for row in op_rows(recorded(run)) if row["name"] == f"aten.{op}"]
    return row


def x(*shape: int, **options: Any) -> torch.Tensor:
    return torch.ones(shape, **options)


#: What runs, its op, its floating-point operations, the bytes it reads and writes.
COSTS: dict[str, tuple[Callable[[], object], str, int | None, int, int]] = {
    "a product of matrices": (lambda: x(5, 3) @ x(3, 2), "mm.default", 2 * 5 * 3 * 2, 4 * 21, 4 * 10),
    "products of batches": (
        lambda: torch.bmm(x(2, 3, 4), x(2, 4, 5)), "bmm.default", 2 * 2 * 3 * 4 * 5, 4 * 64, 4 * 30,
    ),
    "a linear layer": (
        lambda: F.linear(x(2, 3), x(5, 3), x(5)), "addmm.default", 2 * 2 * 3 * 5, 4 * (5 + 6 + 15), 4 * 10,
    ),
    "a convolution": (
        lambda: F.conv2d(x(1, 2, 5, 5), x(4, 2, 3, 3), x(4)),
        "convolution.default", 2 * 9 * 4 * 2 * 9, 4 * (50 + 72 + 4), 4 * 36,
    ),
    "attention": (
        lambda: F.scaled_dot_product_attention(x(1, 2, 6, 4), x(1, 2, 6, 4), x(1, 2, 6, 4)),
        "_scaled_dot_product_flash_attention_for_cpu.default",
        2 * (2 * 6 * 4 * 6) * 2, 4 * 3 * 48, 4 * (48 + 12),
    ),
    "a product of vectors": (lambda: x(4).dot(x(4)), "dot.default", 2 * 4, 4 * 8, 4),
    "an element-wise op": (lambda: x(4) + x(3, 4), "add.Tensor", 0, 4 * 16, 4 * 12),
    "an op in place": (lambda: x(4).add_(1), "add_.Tensor", 0, 16, 16),
    "a cast": (lambda: x(4).to(torch.float16), "_to_copy.default", 0, 16, 8),
    "a comparison": (lambda: x(4) > 0, "gt.Scalar", 0, 16, 4),
    "a reduction": (lambda: x(4).sum(), "sum.default", 0, 16, 4),
    "several outputs": (lambda: x(4).max(0), "max.dim", 0, 16, 4 + 8),
    "a list": (lambda: torch.cat([x(4), x(2)]), "cat.default", 0, 24, 24),
    "an op that reads one tensor twice": (lambda: torch.mul(*[x(4)] * 2), "mul.Tensor", 0, 32, 16),
    "complex numbers": (lambda: x(4, dtype=torch.complex64) * 2, "mul.Tensor", 0, 32, 32),
    "nothing": (lambda: x(0) + 1, "add.Tensor", 0, 0, 0),
    "a new tensor": (lambda: torch.zeros(2, 3, dtype=torch.int64), "zeros.default", 0, 0, 48),
    "a lookup": (
        lambda: F.embedding(torch.zeros(2, dtype=torch.int64), x(5, 3)), "embedding.default", 0, 60 + 16, 24,
    ),
    "an op without a formula": (lambda: torch.fft.fft(x(4)), "_fft_r2c.default", None, 16, 32),
}  # fmt: skip


@pytest.mark.parametrize(("run", "op", "flops", "read", "written"), COSTS.values(), ids=COSTS)
def test_costs_of(run, op, flops, read, written):
    row = one(run, op)
    assert (row["flops"], row["bytes_read"], row["bytes_written"]) == (flops, read, written)
    assert row["is_view"] is False


def test_op_on_a_list_in_place_writes_its_list():
    row = one(lambda: torch._foreach_add_([x(4), x(2)], 1.0), "_foreach_add_.Scalar")
    assert (row["bytes_read"], row["bytes_written"]) == (24, 24)


@pytest.mark.parametrize("foreach", [False, True])
def test_backward_of_a_linear_layer_costs_two_products(foreach):
    model = nn.Linear(3, 5)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, foreach=foreach)

    def run():
        given = x(2, 3).requires_grad_()
        model(given).sum().backward()
        optimizer.step()

    rows = op_rows(recorded(run))
    products = [row["flops"] for row in rows if row["phase"] == "backward" and row["flops"]]
    assert products == [60, 60]
    assert {row["flops"] for row in rows if row["phase"] == "optimizer"} == {0}


# Views.

VIEWS: dict[str, tuple[Callable[[], object], str]] = {
    "a transpose": (lambda: x(2, 3).t(), "t.default"),
    "a view": (lambda: x(2, 3).view(6), "view.default"),
    "a reshape that copies nothing": (lambda: x(2, 3).reshape(6), "view.default"),
    "a slice": (lambda: x(4)[1:], "slice.Tensor"),
    "parts": (lambda: x(4).split(2), "split.Tensor"),
    "an expansion": (lambda: x(1).expand(1000), "expand.default"),
    "a detached tensor": (lambda: x(4).detach(), "detach.default"),
    "other numbers": (lambda: x(4).view(torch.int32), "view.dtype"),
    "a conjugate": (lambda: x(4, dtype=torch.complex64).conj(), "_conj.default"),
}


@pytest.mark.parametrize(("run", "op"), VIEWS.values(), ids=VIEWS)
def test_view_moves_no_bytes_in(run, op):
    row = one(run, op)
    assert (row["is_view"], row["flops"], row["bytes_read"], row["bytes_written"]) == (True, 0, 0, 0)


def test_reshape_that_must_copy_is_no_view():
    row = one(lambda: x(2, 3).t().reshape(6), "clone.default")
    assert (row["is_view"], row["bytes_read"], row["bytes_written"]) == (False, 24, 24)


def test_what_may_be_a_view_is_one_only_when_it_shares_its_storage():
    """In inference mode the mode sees `reshape` itself."""

    def run():
        with torch.inference_mode():
            given = x(2, 3)
            given.reshape(6)
            given.t().reshape(6)

    found = [
        (row["is_view"], row["bytes_written"])
        for row in op_rows(recorded(run))
        if row["name"] == "aten.reshape.default"
    ]
    assert found == [(True, 0), (False, 24)]


# Times.


def test_ops_run_one_after_the_other_inside_of_their_calls():
    model = TiedGPT(layers=2)
    optimizer = torch.optim.AdamW(model.parameters())
    with modtrace.record(model, ops=True, values=None, strict=True) as rec:
        for _ in range(2):
            model(torch.zeros(2, 8, dtype=torch.long), False).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    rows = op_rows(rec)
    times = [time for row in rows for time in (row["start_ns"], row["end_ns"])]
    assert times == sorted(times)
    calls = {call["call_id"]: call for call in rec.table("calls").to_pylist()}
    outside = [
        (row["name"], row["phase"])
        for row in rows
        if row["call_id"] is not None
        and not (
            calls[row["call_id"]]["start_ns"]
            <= row["start_ns"]
            <= row["end_ns"]
            <= calls[row["call_id"]]["end_ns"]
        )
    ]
    assert outside == []
    phases = {row["phase"] for row in rows if row["call_id"] is not None}
    assert phases >= {"forward", "backward", "optimizer"}
