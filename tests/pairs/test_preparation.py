"""Runs that make their model, its weights and a batch while they are recorded, as whole scripts do."""

import torch
from torch import nn

import modtrace

WEIGHTS = torch.linspace(-1, 1, 64).reshape(8, 8)


def script(
    seed: int, *, batch: int = 1, shift: float = 1.0, labels: int = 3, scale: float = 1.0
) -> modtrace.Recording:
    """Draws weights from a seed, loads those that all scripts load, and calls the model on a drawn batch."""
    with modtrace.record(ops=True, strict=True) as rec:
        torch.manual_seed(seed)
        model = nn.Sequential(*(nn.Linear(8, 8) for _ in range(2 + seed)))[:2]
        with torch.no_grad():
            for each in model:
                each.weight.copy_(WEIGHTS)
                each.bias.fill_(0.5)
        torch.manual_seed(batch)
        given = (torch.randn(4, 8) + shift) * 2
        torch.manual_seed(labels)
        wanted = torch.rand(4, 8)
        (model(given) * scale - wanted).square().sum().backward()
    return rec


def test_what_is_drawn_and_overwritten_before_the_first_call_is_no_difference() -> None:
    for pair in ((script(0), script(1)), (script(1), script(0))):
        found = modtrace.compare(*pair)
        assert found.ok, str(found)
        assert found.compared == found.equal > 10
        assert not found.missing and not found.extra


def test_batch_that_is_drawn_otherwise_is_the_first_difference() -> None:
    first = modtrace.compare(script(0), script(1, batch=2)).first
    assert first is not None
    assert (first.path, first.op, first.phase, first.kind) == (None, "aten.randn.default", None, "made")


def test_op_that_prepares_a_batch_otherwise_is_the_first_difference() -> None:
    first = modtrace.compare(script(0), script(1, shift=2.0)).first
    assert first is not None
    assert (first.path, first.op, first.kind, first.through) == (None, "aten.add.Tensor", "made", None)


def test_labels_that_are_drawn_otherwise_are_the_first_difference() -> None:
    first = modtrace.compare(script(0), script(1, labels=4)).first
    assert first is not None
    assert (first.path, first.op, first.phase, first.kind) == (None, "aten.rand.default", None, "made")


def test_what_is_done_with_the_output_is_compared() -> None:
    first = modtrace.compare(script(0), script(1, scale=2.0)).first
    assert first is not None
    assert (first.path, first.op, first.phase) == (None, "aten.mul.Tensor", None)
