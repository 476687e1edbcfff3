"""Mistakes that make no NaN at once: which question to a recording names the module, tensor and step."""

import math
from collections.abc import Callable

import numpy as np
import torch
import torch.nn.functional as F
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


def test_gradient_of_the_embedding_that_spikes_is_flagged_first_and_alone() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(16, 8), nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 8))
    factor = [1.0]
    model[0].weight.register_hook(lambda grad: grad * factor[0])
    tokens = torch.arange(16).repeat(2, 1)
    rec = train(
        model,
        16,
        lambda step: tokens,
        lambda step: factor.__setitem__(0, 30.0 if step == 12 else 1.0),
        triggers=modtrace.OutOfBand(roles="parameter_grad"),
    )
    [(step, text)] = told(rec)
    assert step == 12
    assert text.startswith("0.weight"), text


def test_poisoned_batch_is_flagged_in_its_step_at_the_first_layer_that_it_reaches() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8))
    batches = torch.randn(32, 64, 8)
    batches[14] *= 100
    rec = train(model, 16, lambda step: batches[step], triggers=modtrace.OutOfBand())
    step, text = told(rec)[0]
    assert step == 14
    assert text.startswith("0 output"), text


class Attention(nn.Module):
    def __init__(self, width: int = 64, *, is_scaled: bool = True) -> None:
        super().__init__()
        self.q, self.k, self.v = nn.Linear(width, width), nn.Linear(width, width), nn.Linear(width, width)
        self.scores = nn.Identity()
        self.divisor = math.sqrt(width) if is_scaled else 1.0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        scores = self.scores(self.q(x) @ self.k(x).mT / self.divisor)
        return x + scores.softmax(-1) @ self.v(x)


def test_growth_of_attention_is_seen_at_the_layer_that_grows_before_the_loss_moves() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(Attention(), Attention())

    def grow(step: int) -> None:
        with torch.no_grad():
            model[1].q.weight.mul_(1.02)

    x = torch.randn(2, 8, 64)
    rec = train(model, 20, lambda step: x, grow, learning_rate=0.0)
    found = rec.history(["*.q", "*.scores"], stat="rms")
    growth = found.values[-1] / found.values[0]
    assert [name for name, ratio in zip(found.sites, growth, strict=True) if ratio > 1.2] == [
        "1.q",
        "1.scores",
    ]
    assert (np.diff(rec.history("1.q", stat="rms").values[:, 0]) > 0).all()


def test_scores_without_the_division_by_the_root_of_the_width_are_too_wide_at_step_0() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(Attention(), Attention(is_scaled=False))
    with torch.no_grad():
        for each in (model[0], model[1]):
            nn.init.orthogonal_(each.q.weight)
            nn.init.orthogonal_(each.k.weight)
    found = train(model, 1, lambda step: torch.randn(4, 16, 64)).history("*.scores", stat="std")
    right, wrong = found.values[0]
    assert found.sites == ("0.scores", "1.scores")
    assert 0.5 < right < 2
    assert wrong > 4 * right


class Gated(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate, self.up, self.product = nn.Linear(64, 64), nn.Linear(64, 64), nn.Identity()
        self.down = nn.Linear(64, 64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(self.product(F.silu(self.gate(x)) * self.up(x)))


def test_channel_whose_gate_and_up_weights_align_stands_out_by_crest_and_kurtosis() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(Gated(), Gated(), Gated())
    with torch.no_grad():
        model[2].gate.weight[5] = model[2].up.weight[5] = torch.ones(64) * 10
    rec = train(model, 1, lambda step: torch.randn(32, 64), values=modtrace.Capture(stats=2))
    for stat in ("crest", "kurtosis"):
        values = rec.history("*.product", stat=stat).values[0]
        assert values[2] > 2 * values[:2].max()


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


def test_vanishing_gradient_is_a_slope_of_the_gradients_over_the_depth() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(*(layer for _ in range(8) for layer in (nn.Linear(16, 16), nn.Sigmoid())))
    rec = train(model, 1, lambda step: torch.randn(32, 16))
    linear = [str(number) for number in range(0, 16, 2)]
    gradients = rec.history(linear, role="grad_output", stat="rms")
    assert gradients.sites == tuple(linear)
    slope = np.polyfit(range(8), np.log10(gradients.values[0]), 1)[0]
    assert 0.4 < slope < 2  # each layer divides it by 2.5 or more


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
