"""Which op made a tensor whose storage is set, resized, freed, exchanged, shared, or written to by an optimizer."""

import numpy as np
import pytest
import torch
from torch import nn

from collect.ops.test_ops_tensors import edges, op_rows, recorded


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


def test_tensor_that_is_set_to_show_memory_otherwise_is_made_by_that():
    def run():
        x, y = torch.ones(4), torch.zeros(2)
        y.set_(x.untyped_storage(), 0, (2, 2))
        y * 2

    assert edges(run) == [
        "0 ones.default()",
        "1 zeros.default()",
        "2 set_.source_Storage_storage_offset(self=1)",
        "3 mul.Tensor(self=2)",
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


@pytest.mark.parametrize("split", [lambda x: x.unbind(), lambda x: [x[at] for at in range(len(x))]])
def test_every_one_of_a_hundred_views_has_its_op(split):
    tensors = edges(lambda: torch.stack(list(split(torch.ones(100)))))[-1]
    assert tensors.count("=") == 100 and "leaf" not in tensors


def test_resized_tensor_is_made_by_the_resizing():
    def run():
        x = torch.ones(4)
        x.resize_(2)
        x * 2
        x.resize_(8)
        x * 2

    assert edges(run) == [
        "0 ones.default()",
        "1 resize_.default(self=0)",
        "2 mul.Tensor(self=1)",
        "3 resize_.default(self=1)",
        "4 mul.Tensor(self=3)",
    ]


def test_memory_freed_and_allocated_again_under_a_tensor_is_the_same_storage():
    def run():
        x = torch.ones(4) * 1
        x.untyped_storage().resize_(0)
        x.untyped_storage().resize_(16)
        x.fill_(2)
        x * 1

    assert edges(run) == [
        "0 ones.default()",
        "1 mul.Tensor(self=0)",
        "2 fill_.Scalar(self=1)",
        "3 mul.Tensor(self=2)",
    ]


def test_views_that_show_all_are_told_apart():
    def run():
        x = torch.ones(4)
        y, z = x.detach(), x.view(4)
        y * 2
        z * 2
        x * 2

    assert edges(run) == [
        "0 ones.default()",
        "1 detach.default(self=0)",
        "2 view.default(self=0)",
        "3 mul.Tensor(self=1)",
        "4 mul.Tensor(self=2)",
        "5 mul.Tensor(self=0)",
    ]


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


def test_storages_that_take_each_others_place_are_told_apart():
    def run():
        x = torch.ones(4)
        for _ in range(100):
            x = (x * 2) + 1

    found = edges(run)
    assert found[0] == "0 ones.default()"
    assert found[1::2] == [f"{at} mul.Tensor(self={at - 1})" for at in range(1, 201, 2)]
    assert found[2::2] == [f"{at} add.Tensor(self={at - 1})" for at in range(2, 201, 2)]


def test_weights_used_twice_are_one_tensor():
    layer = nn.Linear(2, 2, bias=False)

    def run():
        layer(layer(torch.ones(2, 2)))

    assert edges(run) == [
        "0 ones.default()",
        "1 t.default(self=leaf0)",
        "2 mm.default(self=0, mat2=1)",
        "3 t.default(self=leaf0)",
        "4 mm.default(self=2, mat2=3)",
    ]


@pytest.mark.parametrize(
    ("make", "writes"),
    [
        (lambda given: torch.optim.SGD(given, lr=0.1, foreach=False), "add_.Tensor"),
        (lambda given: torch.optim.SGD(given, lr=0.1, foreach=True), "_foreach_add_.List"),
        (lambda given: torch.optim.SGD(given, lr=0.1, fused=True), "_fused_sgd_.default"),
        (lambda given: torch.optim.AdamW(given, foreach=False), "addcdiv_.default"),
        (lambda given: torch.optim.AdamW(given, foreach=True), "_foreach_addcdiv_.ScalarList"),
        (lambda given: torch.optim.AdamW(given, fused=True), "_fused_adamw_.default"),
    ],
    ids=["SGD", "SGD, foreach", "SGD, fused", "AdamW", "AdamW, foreach", "AdamW, fused"],
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


def test_swapped_tensors_are_each_other():
    def run():
        a, b = torch.ones(2), torch.zeros(2)
        torch.utils.swap_tensors(a, b)
        a * 2
        b * 3

    assert edges(run) == [
        "0 ones.default()",
        "1 zeros.default()",
        "2 mul.Tensor(self=1)",
        "3 mul.Tensor(self=0)",
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
