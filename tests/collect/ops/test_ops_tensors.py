"""Which op made each tensor that an op reads: chains, ops in place, views, and writes through them."""

from collections.abc import Callable
from typing import Any

import torch

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


def test_chain_of_ops():
    def run():
        x = torch.ones(4)
        y = x * 2
        (y + x).sum()

    assert edges(run) == [
        "0 ones.default()",
        "1 mul.Tensor(self=0)",
        "2 add.Tensor(self=1, other=0)",
        "3 sum.default(self=2)",
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


def test_write_through_a_view_of_a_view_changes_the_whole():
    def run():
        x = torch.ones(2, 3)
        x.view(-1)[0].zero_()
        x.sum()

    assert edges(run) == [
        "0 ones.default()",
        "1 view.default(self=0)",
        "2 select.int(self=1)",
        "3 zero_.default(self=2)",
        "4 sum.default(self=3)",
    ]


def test_write_through_a_transpose_changes_the_whole():
    def run():
        x = torch.ones(2, 3)
        x.t().relu_()
        x.sum()

    assert edges(run) == [
        "0 ones.default()",
        "1 t.default(self=0)",
        "2 relu_.default(self=1)",
        "3 sum.default(self=2)",
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


def test_parts_are_written_one_after_the_other():
    def run():
        x = torch.ones(4)
        x[1:3] = torch.zeros(2)
        x[0] = 5.0
        x * 1

    assert edges(run) == [
        "0 ones.default()",
        "1 zeros.default()",
        "2 slice.Tensor(self=0)",
        "3 copy_.default(self=2, src=1)",
        "4 lift_fresh.default(self=leaf0)",
        "5 select.int(self=3)",
        "6 copy_.default(self=5, src=leaf0)",
        "7 mul.Tensor(self=6)",
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
