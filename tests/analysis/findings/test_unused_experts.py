"""Experts that get no tokens are found, and routers that choose few; lists of other modules are not accused."""

import pytest
import torch
from torch import nn

import modtrace
from builders import RecordingBuilder
from helpers.findings import check_run, check_typed
from helpers.healthy_training import Experts, fit, next_byte, record_run, texts

CHECK = "unused-experts"


class TopOne(nn.Module):
    """Experts under attributes of other names, of which each token takes one."""

    def __init__(self, width: int, count: int = 4) -> None:
        super().__init__()
        self.gate = nn.Linear(width, count)
        self.ffn = nn.ModuleList(nn.Linear(width, width) for _ in range(count))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        flat = x.flatten(0, -2)
        weight, chosen = self.gate(flat).softmax(-1).max(-1)
        out = torch.zeros_like(flat)
        for number in chosen.unique().tolist():
            token = (chosen == number).nonzero()[:, 0]
            out = out.index_add(0, token, self.ffn[number](flat[token]) * weight[token, None])
        return x + out.view_as(x)


@pytest.fixture(autouse=True)
def seed() -> None:
    torch.manual_seed(0)


def train(layer: nn.Module, bias: list[float], **options: object) -> modtrace.Recording:
    """Trains for a few steps with a bias of the router, which does not change."""
    router = layer.router if isinstance(layer, Experts) else layer.gate
    with torch.no_grad():
        router.bias.copy_(torch.tensor(bias))
    model = nn.Sequential(nn.Embedding(128, 16), layer, nn.Linear(16, 128))
    with modtrace.record(model, **options) as rec:
        fit(model, next_byte(model, texts()), 7, torch.optim.SGD(model.parameters(), lr=1e-3))
    return rec


def test_one_expert_that_is_never_chosen_is_found() -> None:
    (found,) = check_run(train(Experts(16), [0, 0, -50, 0]), CHECK)
    assert (found.severity, found.path) == ("warning", "1.experts.2")
    assert found.text == "1 of 4 experts gets no tokens: Sequential/1.experts.2"


def test_router_that_sends_all_to_one_is_found() -> None:
    (found,) = check_run(train(TopOne(16), [50, 0, 0, 0]), CHECK)
    assert found.text == "3 of 4 experts get no tokens: Sequential/1.ffn.1..3"
    assert found.evidence == ("Sequential/1.ffn.0 gets 100% of 1,240 tokens",)


class Drawing(nn.Linear):
    """A router that draws the expert of each token: with these logits, two experts get 2 of 100 tokens each."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return 0 * super().forward(x) + self.bias - torch.rand(*x.shape[:-1], 4).log().neg().log()


def test_router_that_hardly_uses_half_of_its_experts_is_found() -> None:
    layer = TopOne(16)
    layer.gate = Drawing(16, 4)
    (found,) = check_run(train(layer, [3.4, 3.4, 0, 0]), CHECK)
    assert found.text == "2 of 4 experts get hardly any tokens: Sequential/1.ffn.2..3"


@pytest.mark.parametrize("kind", [Experts, TopOne])
def test_routers_that_use_all_experts_are_not_accused(kind: type[nn.Module]) -> None:
    assert check_run(train(kind(16), [0, 0, 0, 0]), CHECK) == ()


class EveryOther(nn.Module):
    """A list of layers of which some are left out, on batches of different lengths."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(6))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers[:4]:
            x = layer(x)
        return x


def test_layers_of_a_list_that_are_left_out_are_no_experts() -> None:
    model = EveryOther()
    with modtrace.record(model) as rec:
        fit(model, lambda: model(torch.randn(int(torch.randint(200, 300, ())), 8)).square().mean(), 8)
    assert check_run(rec, CHECK) == ()


@pytest.mark.parametrize("name", ["two heads that take turns", "mixture of experts, text"])
def test_healthy_trainings_are_not_accused(name: str) -> None:
    assert check_run(record_run(name, 10), CHECK) == ()


def test_recordings_without_outputs_cannot_be_checked() -> None:
    check_typed(RecordingBuilder().data(), CHECK, why="no outputs of modules were recorded")


def test_one_of_many_experts_without_tokens_is_a_note() -> None:
    (found,) = check_run(train(Experts(16, 8), [0, 0, 0, -50, 0, 0, 0, 0]), CHECK)
    assert (found.severity, found.path) == ("note", "1.experts.3")


class Together(nn.Module):
    """Experts that are computed together, behind a router that returns its choice."""

    def __init__(self, width: int, count: int = 4) -> None:
        super().__init__()
        self.gate = _Router(width, count)
        self.weights = nn.Parameter(torch.randn(count, width, width) / width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        _, _, weight, chosen = self.gate(x.flatten(0, -2))
        out = torch.einsum("tw,tkwv,tk->tv", x.flatten(0, -2), self.weights[chosen], weight)
        return x + out.view_as(x)


class _Router(nn.Linear):
    """Returns hidden states, logits, weights and numbers of experts."""

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        logits = super().forward(x)
        return torch.cat([x, x], -1), logits.bfloat16(), *logits.softmax(-1).topk(2)


class _Unlogged(_Router):
    """Returns the numbers of experts without their logits."""

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        hidden, _, *chosen = super().forward(x)
        return hidden, *chosen


class _Choosing(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate = _Unlogged(16, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.gate(x)[1].sum(-1, keepdim=True)


def test_numbers_beside_hidden_states_alone_are_no_experts() -> None:
    values = ["stats", modtrace.Capture(include="**.gate", roles=("output",), tensors=True)]
    assert check_run(train(_Choosing(), [50, 0, -50, 50], values=values), CHECK) == ()


@pytest.mark.parametrize("bias", [[0, 0, 0, 0], [50, 0, -50, 50]])
def test_experts_in_one_module_are_counted_where_routers_outputs_are_recorded_whole(
    bias: list[float],
) -> None:
    values = ["stats", modtrace.Capture(include="**.gate", roles=("output",), tensors=True)]
    found = check_run(train(Together(16), bias, values=values), CHECK)
    if any(bias):
        assert (found[0].severity, found[0].path) == ("warning", "1.gate")
        assert found[0].text == "2 of 4 experts get no tokens: 1, 2 of Sequential/1.gate"
        assert found[0].evidence == ("expert 0 gets 50% of 2,480 choices",)
    else:
        assert not found
