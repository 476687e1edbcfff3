"""Mistakes that make no NaN at once: which question to a recording names the module, tensor and step."""

from collections.abc import Callable

import torch
from torch import nn

import modtrace


def train(
    model: nn.Module,
    steps: int,
    batch: Callable[[int], torch.Tensor],
    before: Callable[[int], object] = lambda step: None,
    learning_rate: float = 1e-3,
    **options: object,
) -> modtrace.Recording:
    """Returns the recording of a training; `before` is called with the number of each step before it."""
    optimizer = torch.optim.SGD(model.parameters(), lr=learning_rate)
    with modtrace.record(model, **options) as rec:
        for step in range(steps):
            before(step)
            optimizer.zero_grad()
            model(batch(step)).float().square().mean().backward()
            optimizer.step()
    return rec


def told(rec: modtrace.Recording) -> list[tuple[int | None, str]]:
    return [(note.step, note.reason) for note in rec.triggers]


def test_poisoned_batch_is_flagged_in_its_step_at_the_first_layer_that_it_reaches() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8))
    batches = torch.randn(32, 64, 8)
    batches[14] *= 100
    rec = train(model, 16, lambda step: batches[step], triggers=modtrace.OutOfBand())
    step, text = told(rec)[0]
    assert step == 14
    assert text.startswith("0 output"), text


class Experts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.router, self.shares = nn.Linear(8, 4), nn.Softmax(dim=-1)
        self.experts = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        shares = self.shares(self.router(x))
        chosen, found = shares.argmax(-1), torch.zeros_like(x)
        for number, expert in enumerate(self.experts):
            is_sent = chosen == number
            found[is_sent] = shares[is_sent][:, number, None] * expert(x[is_sent])
        return x + found


def test_collapsed_router_is_seen_in_its_shares_and_in_experts_without_gradients() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(Experts(), Experts())
    with torch.no_grad():
        model[1].router.bias[2] += 30
    rec = train(model, 2, lambda step: torch.randn(64, 8))
    shares = rec.history("*.shares", stat="max")
    lowest = rec.history("*.shares", stat="min")
    assert shares.sites == ("0.shares", "1.shares")
    assert (shares.values[:, 1] > 0.999).all()
    assert (lowest.values[:, 1] < 1e-6).all()
    assert (shares.values[:, 0] < 0.999).all()
    gradients = rec.history("*.experts.*.weight", role="parameter_grad", stat="abs_max")
    dead = [
        name for name, largest in zip(gradients.sites, gradients.values.max(0), strict=True) if not largest
    ]
    assert dead == ["1.experts.0.weight", "1.experts.1.weight", "1.experts.3.weight"]


def test_dead_relu_is_the_layer_whose_outputs_are_all_zero() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(*(layer for _ in range(3) for layer in (nn.Linear(8, 8), nn.ReLU())))
    with torch.no_grad():
        model[2].bias.fill_(-100)
    rec = train(model, 2, lambda step: torch.randn(64, 8), values=modtrace.Capture(stats=2))
    zeros = rec.history(["1", "3", "5"], stat="zero_fraction")
    assert zeros.sites == ("1", "3", "5")
    assert (zeros.values == 1).tolist() == [[False, True, False]] * 2


def test_float16_activations_near_their_largest_number_are_told_a_step_before_the_overflow() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)).half()
    with torch.no_grad():
        model[0].weight.zero_()
        model[0].bias.fill_(1.0)
    model[0].requires_grad_(False)  # its gradients would overflow at once
    x = torch.ones(4, 8).half()

    def grow(step: int) -> None:
        with torch.no_grad():
            model[1].weight.fill_(1250.0 * 2**step)  # of eight inputs, which are 1

    rec = train(
        model,
        4,
        lambda step: x,
        grow,
        learning_rate=0.0,
        triggers=[modtrace.Above("abs_max", 0.5 * 65504), modtrace.NonFinite()],
    )
    notes = told(rec)
    assert [step for step, _ in notes] == [2, 3]
    assert [text.partition(" of ")[0].partition(": ")[0] for _, text in notes] == ["1 output", "output"], (
        notes
    )
