"""Small models with one difficulty each for drawing, and what they are called with."""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

import modtrace
from modtrace.api.model_graph import ModelGraph


class Case(NamedTuple):
    """A model, and the arguments of one call."""

    model: nn.Module
    args: tuple[Any, ...] = ()
    kwargs: dict[str, Any] = {}  # noqa: RUF012  a default that nobody writes to


class Bilinear(nn.Module):
    """Takes two tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.mix = nn.Bilinear(2, 3, 4)

    def forward(self, one: Tensor, other: Tensor) -> Tensor:
        return self.mix(one, other)


class AddsInPlace(nn.Module):
    """Adds to what it has made, then reads it."""

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        x = x * 2
        x += y
        return x * y


class WritesItem(nn.Module):
    """Writes a column, then reads the whole."""

    def forward(self, x: Tensor, column: Tensor) -> Tensor:
        x = x.clone()
        x[:, 0] = column
        return x.sum()


class Views(nn.Module):
    """Looks at a part of its input through three views."""

    def forward(self, x: Tensor) -> Tensor:
        return x.view(-1)[1:].unsqueeze(0) * 2


class Tied(nn.Module):
    """The head has the weight of the embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.emb = nn.Embedding(5, 4)
        self.head = nn.Linear(4, 5, bias=False)
        self.head.weight = self.emb.weight

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.emb(tokens))


class CalledThreeTimes(nn.Module):
    """Sends what a layer returns through it again, and again."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(self.layer(self.layer(x)))


class Scaled(nn.Module):
    """Takes its tensors by name, with an int, a text and None beside them."""

    def forward(self, x: Tensor, *, scale: Tensor, times: int, how: str, mask: None = None) -> Tensor:
        return getattr(torch, how)(x * scale, times)


class ByName(nn.Module):
    """Hands everything on by name."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = Scaled()

    def forward(self, x: Tensor, scale: Tensor, times: int, how: str, mask: None) -> Tensor:
        return self.inner(x=x, scale=scale, times=times, how=how, mask=mask)


class Structures(nn.Module):
    """Takes tensors in containers, and returns `give` of twice the first and the negative of the second."""

    def __init__(self, give: Callable[[Tensor, Tensor], Any]) -> None:
        super().__init__()
        self.give = give

    def forward(self, given: Any) -> Any:
        (one, [other, nothing]), = given["pairs"]  # fmt: skip
        assert nothing is None
        return self.give(one * 2, other.neg())


def ones(*shape: int) -> Tensor:
    """An input that wants a gradient: models without parameters are trained too."""
    return torch.ones(shape, requires_grad=True)


def _structures(give: Callable[[Tensor, Tensor], Any]) -> Case:
    given = {"pairs": [(ones(2), [ones(3), None])]}
    return Case(Structures(give), (given,))


def _model_output(one: Tensor, other: Tensor) -> Any:
    from transformers.modeling_outputs import BaseModelOutput

    return BaseModelOutput(last_hidden_state=one, hidden_states=(one, other))


def _gpt2() -> Case:
    from transformers import GPT2Config, GPT2LMHeadModel

    sizes = {"vocab_size": 50, "n_positions": 16, "n_embd": 16, "n_layer": 2, "n_head": 2}
    config = GPT2Config(**sizes, bos_token_id=0, eos_token_id=0)
    return Case(GPT2LMHeadModel(config), (torch.arange(12).reshape(2, 6),), {"use_cache": True})


#: What is drawn in full by tests, and trained on.
CASES: dict[str, Callable[[], Case]] = {
    "MLP": lambda: Case(nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 2)), (torch.randn(2, 4),)),
    "two inputs": lambda: Case(Bilinear(), (torch.randn(2, 2), torch.randn(2, 3))),
    "in-place ReLU": lambda: Case(
        nn.Sequential(nn.Linear(4, 3), nn.ReLU(inplace=True)), (torch.randn(2, 4),)
    ),
    "in-place add": lambda: Case(AddsInPlace(), (ones(3), ones(3))),
    "__setitem__": lambda: Case(WritesItem(), (ones(2, 3), ones(2))),
    "views": lambda: Case(Views(), (ones(2, 3),)),
    "tied weights": lambda: Case(Tied(), (torch.tensor([1, 3]),)),
    "BatchNorm": lambda: Case(nn.Sequential(nn.BatchNorm1d(4)), (torch.randn(3, 4),)),
    "Identity": lambda: Case(
        nn.Sequential(nn.Identity(), nn.Linear(4, 2, bias=False)), (torch.randn(2, 4),)
    ),
    "called three times": lambda: Case(CalledThreeTimes(), (torch.randn(2, 4),)),
    "plain arguments by name": lambda: Case(ByName(), (ones(2), ones(2)), {"times": 0, "how": "sum", "mask": None}),
    "Embedding": lambda: Case(nn.Embedding(5, 4), (torch.tensor([1, 3]),)),
    "LSTM": lambda: Case(nn.LSTM(4, 6, num_layers=2, dropout=0.2), (torch.randn(3, 2, 4),)),
    "nested tuples": lambda: _structures(lambda one, other: (one, (other, (one,)))),
    "dict": lambda: _structures(lambda one, other: {"one": one, "more": {"other": other}}),
    "ModelOutput": lambda: _structures(_model_output),
    "list": lambda: _structures(lambda one, other: [one, other]),
    "None": lambda: _structures(lambda one, other: (None, one, "text", 3)),
    "cache": _gpt2,
    "attention": lambda: Case(nn.MultiheadAttention(4, 2), tuple(torch.randn(3, 1, 4) for _ in range(3))),
}  # fmt: skip


def make_case(name: str) -> Case:
    """The case of that name; the model has the same weights each time."""
    torch.manual_seed(0)
    return CASES[name]()


def draw_case(name: str) -> ModelGraph:
    """The graph of that case."""
    case = make_case(name)
    return modtrace.graph(case.model, *case.args, **case.kwargs)
