"""The first values that are not finite are named with their op and line, or with what was finite before."""

import pytest
import torch
from torch import nn

import modtrace
from helpers.findings import check_run
from modtrace.views.text.findings import render_findings

CHECK = "nonfinite"


class MaskedMean(nn.Module):
    """Averages over the words that are no padding, of which a batch may have none."""

    def __init__(self, encoder: nn.Module) -> None:
        super().__init__()
        self.encoder, self.head = encoder, nn.Linear(8, 3)

    def forward(self, x: torch.Tensor, keep: torch.Tensor) -> torch.Tensor:
        kept = self.encoder(x) * keep
        return self.head(kept.sum(1) / keep.sum(1))


ENCODERS = {"linear": lambda: nn.Linear(8, 8), "convolution": lambda: nn.Conv1d(5, 5, 1)}


def _train(model: nn.Module, *, bad: int = 3, **options: object) -> modtrace.Recording:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with modtrace.record(model, strict=True, **options) as rec:
        for step in range(6):
            keep = torch.full((4, 5, 1), 0.0 if step == bad else 1.0)
            optimizer.zero_grad()
            model(torch.randn(4, 5, 8), keep).square().mean().backward()
            optimizer.step()
    return rec


@pytest.mark.parametrize("encoder", ENCODERS)
def test_module_that_is_first_is_not_accused_where_only_outputs_were_measured(encoder: str) -> None:
    [found] = check_run(_train(MaskedMean(ENCODERS[encoder]())), CHECK)
    assert (found.path, found.step) == ("head", 3)
    assert found.text == "the output of head is the first that is not finite: 12 NaN in step 3"
    assert found.evidence == (
        "what encoder returned before is finite: head made them, or MaskedMean between encoder and head",
    )
    assert "--ops" in found.remedy


@pytest.mark.parametrize("encoder", ENCODERS)
def test_op_is_named_with_its_line_and_what_to_do(encoder: str) -> None:
    rec = _train(MaskedMean(ENCODERS[encoder]()), ops=modtrace.Ops(source=True))
    [found] = check_run(rec, CHECK)
    assert found.text.startswith("aten.div.Tensor in MaskedMean makes 32 NaN in step 3, at ")
    assert f"{__file__}:" in found.text
    assert found.evidence == ("division by 0: its divisor holds 0",)
    assert found.remedy.startswith("add an epsilon to the divisor")
    text = render_findings(rec.findings(only=[CHECK]), run="my runs/a")
    assert "modtrace nonfinite 'my runs/a' (first_nonfinite())" in text


def test_loss_outside_of_modules_is_named_as_such() -> None:
    model = nn.Sequential(nn.Linear(4, 4))
    with modtrace.record(model, strict=True) as rec:
        (model(torch.randn(2, 4)).sum() * float("inf")).backward()
    [found] = check_run(rec, CHECK)
    assert found.text.startswith("the loss is the first that is not finite: 1 ")
    assert found.evidence == ()


@pytest.mark.parametrize("encoder", ENCODERS)
def test_finite_values_are_left_alone(encoder: str) -> None:
    assert check_run(_train(MaskedMean(ENCODERS[encoder]()), bad=-1), CHECK) == ()


@pytest.mark.parametrize("is_guarded", [False, True])
def test_step_whose_gradients_no_optimizer_used_is_said_to_be_such(is_guarded: bool) -> None:
    model = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    with modtrace.record(model) as rec:
        for step in range(6):
            x = torch.full((2, 4), torch.nan) if step == 3 else torch.randn(2, 4)
            loss = model(x).square().mean()
            optimizer.zero_grad()
            loss.backward()
            if not is_guarded or loss.isfinite():
                optimizer.step()
    (found,) = check_run(rec, CHECK)
    assert ("no optimizer used the gradients of step 3" in found.evidence) is is_guarded
