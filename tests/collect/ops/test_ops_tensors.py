"""Which op made each tensor that an op reads: ops in place, views, memory that is set, shared, or written unseen."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import modtrace


def recorded(run: Callable[[], object]) -> modtrace.Recording:
    """The ops of a run."""
    torch.manual_seed(0)
    with modtrace.record(ops=True, values=None, strict=True) as rec:
        run()
    assert rec.meta.marks == ()
    return rec


def op_rows(rec: modtrace.Recording) -> list[dict[str, Any]]:
    """The rows of `ops` in the order in which they ran."""
    return sorted(rec.table("ops").to_pylist(), key=lambda row: row["op_id"])


def edges(run: Callable[[], object]) -> list[str]:
    """A line for each op: `2 add.Tensor(self=1, other=0)`, where 1 and 0 are the ops that made what it reads.

    Behind the number of an op that returns several tensors stands which one. `leaf0` was made by no op.
    """
    rec = recorded(run)
    rows = op_rows(rec)
    numbers = {row["op_id"]: number for number, row in enumerate(rows)}
    tensors = {row["tensor_id"]: row for row in rec.table("tensors").to_pylist()}
    leaves: dict[int, str] = {}

    def source(tensor: int) -> str:
        made = tensors[tensor]["producer_op"]
        if made is None:
            return leaves.setdefault(tensor, f"leaf{len(leaves)}")
        return f"{numbers[made]}{tensors[tensor]['slot']}"

    given: dict[int, list[str]] = {row["op_id"]: [] for row in rows}
    for use in rec.table("uses").to_pylist():
        if use["consumer_op"] is None:
            continue  # an outermost call returns it
        given[use["consumer_op"]].append(f"{use['slot']}={source(use['tensor_id'])}")
    return [
        f"{number} {row['name'].removeprefix('aten.')}({', '.join(given[row['op_id']])})"
        for number, row in enumerate(rows)
    ]


def test_op_in_place_makes_what_is_read_after_it():
    def run():
        x = torch.ones(4)
        y = x * 2
        x.mul_(3)
        z = x + y
        x.add_(y)
        x + z

    assert edges(run) == [
        "0 ones.default()",
        "1 mul.Tensor(self=0)",
        "2 mul_.Tensor(self=0)",
        "3 add.Tensor(self=2, other=1)",
        "4 add_.Tensor(self=2, other=1)",
        "5 add.Tensor(self=4, other=3)",
    ]


def test_write_into_a_column_changes_the_whole():
    def run():
        x = torch.ones(2, 3)
        x[:, 0] *= 2
        x.sum()

    assert edges(run) == [
        "0 ones.default()",
        "1 select.int(self=0)",
        "2 mul_.Tensor(self=1)",
        "3 select.int(self=2)",
        "4 copy_.default(self=3, src=2)",
        "5 sum.default(self=4)",
    ]


def test_write_into_the_whole_changes_a_view_made_before():
    def run():
        x = torch.ones(4)
        part = x[1:]
        x.mul_(2)
        part + 1
        x + 1

    assert edges(run) == [
        "0 ones.default()",
        "1 slice.Tensor(self=0)",
        "2 mul_.Tensor(self=0)",
        "3 add.Tensor(self=2)",
        "4 add.Tensor(self=2)",
    ]


def test_out_makes_what_it_is_given():
    def run():
        x, y, z = torch.ones(4), torch.empty(4), torch.empty(2, 4)
        torch.add(x, x, out=y)
        torch.add(y, x, out=z[0])
        z * 2
        torch.add(x, x, out=x)
        x * 2

    assert edges(run) == [
        "0 ones.default()",
        "1 empty.memory_format()",
        "2 empty.memory_format()",
        "3 add.out(self=0, other=0, out=1)",
        "4 select.int(self=2)",
        "5 add.out(self=3, other=0, out=4)",
        "6 mul.Tensor(self=5)",
        "7 add.out(self=0, other=0, out=0)",
        "8 mul.Tensor(self=7)",
    ]


# Storages.


def test_tensor_that_is_set_to_another_ones_memory_is_that_one():
    def run():
        x, y = torch.ones(4), torch.zeros(2)
        y.set_(x)
        y * 2
        x.mul_(3)
        y * 2

    assert edges(run) == [
        "0 ones.default()",
        "1 zeros.default()",
        "2 set_.source_Tensor(self=1, source=0)",
        "3 mul.Tensor(self=2)",
        "4 mul_.Tensor(self=0)",
        "5 mul.Tensor(self=4)",
    ]


def test_tensor_that_is_turned_in_place_is_made_by_that():
    def run():
        x = torch.ones(2, 3)
        x.t_()
        x * 2
        x.unsqueeze_(0)
        x * 2

    assert edges(run) == [
        "0 ones.default()",
        "1 t_.default(self=0)",
        "2 mul.Tensor(self=1)",
        "3 unsqueeze_.default(self=1)",
        "4 mul.Tensor(self=3)",
    ]


def test_every_one_of_a_hundred_views_has_its_op():
    tensors = edges(lambda: torch.stack(list(torch.ones(100))))[-1]
    assert tensors.count("=") == 100 and "leaf" not in tensors


def test_what_autograd_saved_is_what_was_saved():
    def run():
        x = torch.ones(2, requires_grad=True)
        y = x * 2
        del x
        (y * y).sum().backward()

    assert edges(run) == [
        "0 ones.default()",
        "1 mul.Tensor(self=0)",
        "2 mul.Tensor(self=1, other=1)",
        "3 sum.default(self=2)",
        "4 ones_like.default(self=3)",
        "5 expand.default(self=4)",
        "6 mul.Tensor(self=5, other=1)",
        "7 mul.Tensor(self=5, other=1)",
        "8 add.Tensor(self=7, other=6)",
        "9 mul.Tensor(self=8)",
        "10 detach.default(self=9)",
    ]


@pytest.mark.parametrize(
    ("make", "writes"),
    [
        (lambda given: torch.optim.SGD(given, lr=0.1, foreach=False), "add_.Tensor"),
        (lambda given: torch.optim.SGD(given, lr=0.1, foreach=True), "_foreach_add_.List"),
        (lambda given: torch.optim.AdamW(given, fused=True), "_fused_adamw_.default"),
    ],
    ids=["SGD", "SGD, foreach", "AdamW, fused"],
)
def test_weights_are_made_by_the_optimizer(make, writes):
    layer = nn.Linear(2, 2, bias=False)
    optimizer = make(layer.parameters())

    def run():
        layer(torch.ones(2, 2)).sum().backward()
        optimizer.step()
        layer(torch.ones(2, 2))

    found = edges(run)
    name, _, weight = found[-2].rstrip(")").partition("(self=")
    assert name.endswith(" t.default")
    assert found[int(weight)].partition("(")[0] == f"{weight} {writes}"


def test_data_that_are_exchanged_are_the_new_ones():
    parameter = nn.Parameter(torch.ones(2))

    def run():
        parameter * 2
        parameter.data = torch.zeros(2)
        parameter * 2
        parameter.data.mul_(3)
        parameter * 2

    assert edges(run) == [
        "0 mul.Tensor(self=leaf0)",
        "1 zeros.default()",
        "2 mul.Tensor(self=1)",
        "3 detach.default(self=1)",
        "4 mul_.Tensor(self=3)",
        "5 mul.Tensor(self=4)",
    ]


def test_memory_shared_with_numpy_is_a_leaf_of_each_tensor_that_shows_it():
    def run():
        memory = np.ones(2)
        a, b = torch.from_numpy(memory), torch.from_numpy(memory)
        a.mul_(2)
        b * 2  # that it has been written to cannot be seen

    assert edges(run)[-2:] == ["2 mul_.Tensor(self=leaf0)", "3 mul.Tensor(self=leaf1)"]


def test_version_counts_the_writes_of_a_storage_and_the_offset_is_that_of_the_view():
    def run():
        x = torch.ones(4)
        x[2:].mul_(2)
        x.data.add_(1)
        torch._foreach_mul_([x[:1], x[1:]], 2)
        x * 1

    rec = recorded(run)
    names = {row["op_id"]: row["name"] for row in op_rows(rec)}
    tensors = {row["tensor_id"]: row for row in rec.table("tensors").to_pylist()}
    used = [
        (names[use["consumer_op"]], *(tensors[use["tensor_id"]][each] for each in ("version", "offset")))
        for use in rec.table("uses").to_pylist()
    ]
    assert used == [
        ("aten.slice.Tensor", 0, 0),
        ("aten.mul_.Tensor", 0, 2),
        ("aten.detach.default", 1, 0),
        ("aten.add_.Tensor", 1, 0),
        ("aten.slice.Tensor", 2, 0),
        ("aten.slice.Tensor", 2, 0),
        ("aten._foreach_mul_.Scalar", 2, 0),
        ("aten._foreach_mul_.Scalar", 2, 1),
        ("aten.mul.Tensor", 3, 0),
    ]
    assert len({tensors[use["tensor_id"]]["storage"] for use in rec.table("uses").to_pylist()}) == 1


# What a recording says of tensors that are not plain.


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
