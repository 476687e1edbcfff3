"""Parameters are measured as the step used them, their gradients as the optimizer gets them."""

from typing import Any

import pytest
import torch
from torch import nn

import modtrace
import zoo
from helpers.stat_rows import holds, names, one, rows


@pytest.fixture(autouse=True)
def from_a_seed(seeded: None) -> None:
    """Every test starts from the same numbers."""


def record(*arguments: Any, **options: Any) -> modtrace.LiveRecording:
    return modtrace.record(*arguments, strict=True, **options)


def copied(tensors: Any) -> list[torch.Tensor]:
    return [each.detach().clone() for each in tensors]


@pytest.mark.parametrize("fused", [False, True])  # a fused optimizer does not count its writes
def test_parameters_are_measured_before_the_optimizer_changes_them(fused):
    model = zoo.TiedGPT(layers=1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, fused=fused)
    kept: list[dict[str, torch.Tensor]] = []
    with record(model) as rec:
        for _ in range(2):
            kept.append({name: each.detach().clone() for name, each in model.named_parameters()})
            optimizer.zero_grad()
            model(torch.randint(0, 17, (2, 8))).sum().backward()
            optimizer.step()
    for step, parameters in enumerate(kept):
        for name, tensor in parameters.items():
            path, _, slot = name.rpartition(".")
            assert holds(one(rec, step=step, role="parameter", path=path, slot=slot), tensor)


def test_gradients_are_measured_after_clipping():
    model = nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with record(model) as rec:
        (model(torch.ones(2, 4)).sum() * 100).backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        clipped = copied(each.grad for each in model.parameters())
        optimizer.step()
    assert norm > 100
    weight, bias = rows(rec, role="parameter_grad")
    assert (weight.slot, bias.slot) == ("weight", "bias")
    assert holds(weight, clipped[0])
    assert holds(bias, clipped[1])
    assert weight.sumsq + bias.sumsq == pytest.approx(1.0, rel=1e-5)


def test_parameter_that_nobody_owns_is_named_by_its_place_in_the_optimizer():
    model = nn.Linear(1, 1, bias=False)
    free = nn.Parameter(torch.tensor([3.0, 4.0]))
    groups = [{"params": list(model.parameters())}, {"params": [free], "lr": 0.5}]
    optimizer = torch.optim.SGD(groups, lr=0.1)
    weight = model.weight.item()
    with record(model) as rec:
        for _ in range(2):
            optimizer.zero_grad()
            (model(torch.ones(1, 1)).sum() + free.square().sum()).backward()
            optimizer.step()
    found = rows(rec, path=None)
    assert names(found, "step", "role", "slot", "sum", "nth") == [
        (0, "loss", "", pytest.approx(weight + 25), None),
        (0, "parameter", "param_groups[1].params[0]", 7, None),
        (0, "parameter_grad", "param_groups[1].params[0]", 14, None),
        (1, "loss", "", pytest.approx(weight - 0.1), None),
        (1, "parameter", "param_groups[1].params[0]", 0, None),
        (1, "parameter_grad", "param_groups[1].params[0]", 0, None),
    ]
    sites = [site for site in rec.table("sites").to_pylist() if site["slot"].startswith("param_groups")]
    assert [site["module_id"] for site in sites] == [None, None]


def test_sparse_gradient_of_an_embedding_is_measured_by_its_stored_values():
    model = nn.Embedding(5, 2, sparse=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with record(model) as rec:
        model(torch.tensor([1, 1, 2])).sum().backward()
        optimizer.step()
    row = one(rec, role="parameter_grad")
    assert (row.shape, row.count, row.min, row.max, row.sum) == ((5, 2), 6, 1, 1, 6)
    assert row.note == "sparse: the stored values, those of one place apart (not coalesced)"


def test_optimizer_of_tensors_that_no_module_holds_yet_names_them_when_one_does():
    class Late(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = nn.Linear(4, 4)

        def forward(self, x):
            return self.late(self.first(x)) if hasattr(self, "late") else self.first(x)

    model, late = Late(), nn.Linear(4, 4)
    optimizer = torch.optim.SGD([*model.parameters(), *late.parameters()], lr=0.1)
    with record(model) as rec:
        for step in range(2):
            if step == 1:
                model.late = late
            model(torch.ones(2, 4)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    slots = ["param_groups[0].params[2]", "param_groups[0].params[3]"]
    assert names(rows(rec, role="parameter", path=None), "step", "slot") == [(0, each) for each in slots]
    assert names(rows(rec, role="parameter", path="late"), "step", "slot") == [(1, "weight"), (1, "bias")]


def test_gradients_of_a_step_with_a_closure_are_those_the_closure_left():
    """As Lightning steps: in the pre-hook the gradients of the step before would still be there."""
    model = nn.Linear(1, 1, bias=False)
    model.weight.data.fill_(5.0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    scale = iter((1.0, 2.0, 4.0))

    def closure():
        optimizer.zero_grad()
        loss = model(torch.ones(1, 1)).sum() * next(scale)
        loss.backward()
        return loss

    with record(model) as rec:
        for _ in range(3):
            optimizer.step(closure)
    assert names(rows(rec, role="parameter"), "step", "sum") == [(0, 5.0), (1, 4.5), (2, 3.5)]
    assert names(rows(rec, role="parameter_grad"), "step", "sum") == [(0, 1.0), (1, 2.0), (2, 4.0)]


def test_frame_and_first_nonfinite_name_a_parameter_that_nobody_owns():
    free = nn.Parameter(torch.tensor([float("nan")]))
    optimizer = torch.optim.SGD([free], lr=0.1)
    with record() as rec:
        free.sum().backward()
        optimizer.step()
    frame = rec.frame("values")
    assert frame.role.tolist() == ["loss", "parameter", "parameter_grad"]
    assert frame.path.isna().tolist() == [True] * 3
    assert frame.slot.tolist() == ["", *["param_groups[0].params[0]"] * 2]
    found = rec.first_nonfinite()
    assert (found.path, found.role, found.slot) == (None, "parameter", "param_groups[0].params[0]")
