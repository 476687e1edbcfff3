"""Models that a proof of a recording must hold for: those with difficulties, and twenty architectures."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

import zoo
from helpers.architectures import ARCHITECTURES, tokens

Made = tuple[nn.Module, tuple[Any, ...], dict[str, Any]]


class Calls(nn.Module):
    """Calls a function with its two linear layers and what it is given."""

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.one = nn.Linear(4, 4)
        self.two = nn.Linear(4, 4)
        self.function = function

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.function(self, *args, **kwargs)


@dataclass
class Answer:
    """What a model may return."""

    hidden: torch.Tensor
    cache: list[torch.Tensor]
    nothing: None = None


class Double(torch.autograd.Function):
    """Works without grad mode inside."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x)
        with torch.no_grad():
            return x * 2

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        (x,) = ctx.saved_tensors
        return grad * 2 + x * 0


def _write_through_select(model: Calls, x: torch.Tensor) -> torch.Tensor:
    h = model.one(x)
    h[:, 0] *= 2
    return model.two(h)


def _write_through_view(model: Calls, x: torch.Tensor) -> torch.Tensor:
    h = model.one(x)
    h.view(-1)[0].zero_()
    return model.two(h)


def _write_through_transpose(model: Calls, x: torch.Tensor) -> torch.Tensor:
    h = model.one(x)
    h.t().relu_()
    return model.two(h)


def _write_to_data(model: Calls, x: torch.Tensor) -> torch.Tensor:
    h = model.one(x)
    h.data.mul_(2)
    return model.two(h)


def _gradient_inside(model: Calls, x: torch.Tensor) -> torch.Tensor:
    x = x.requires_grad_()
    with torch.enable_grad():
        (grad,) = torch.autograd.grad(model.one(x).tanh().sum(), x, create_graph=True)
    return model.two(grad)


def _autocast(model: Calls, x: torch.Tensor) -> torch.Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        return model.two(model.one(x).relu())


def _out_argument(model: Calls, x: torch.Tensor) -> torch.Tensor:
    h = torch.empty(3, 4)
    with torch.no_grad():
        torch.mul(x, 2, out=h)
        torch._foreach_add_([h], 1.0)
    return model.two(model.one(h))


def _fourier(model: Calls, x: torch.Tensor) -> torch.Tensor:
    h = torch.fft.fft(model.one(x)).conj()
    return model.two(torch.fft.ifft(h).imag + h.real)


def _checkpointed(reentrant: bool) -> Callable[[Calls, torch.Tensor], torch.Tensor]:
    def run(model: Calls, x: torch.Tensor) -> torch.Tensor:
        def block(h: torch.Tensor) -> torch.Tensor:
            return F.dropout(model.one(h).relu(), 0.3)

        h = model.two(x)
        h = checkpoint(block, h, use_reentrant=reentrant)
        return checkpoint(block, h, use_reentrant=reentrant)

    return run


def _x() -> torch.Tensor:
    return torch.randn(3, 4)


def _calls(function: Callable[..., Any]) -> Callable[[], Made]:
    return lambda: (Calls(function), (_x(),), {})


def _mlp() -> Made:
    return (
        nn.Sequential(nn.Linear(4, 8), nn.ReLU(inplace=True), nn.Dropout(0.2), nn.Linear(8, 4)),
        (_x(),),
        {},
    )


def _lstm() -> Made:
    return nn.LSTM(4, 5, num_layers=2, bidirectional=True, batch_first=True), (torch.randn(2, 6, 4),), {}


def _transformer() -> Made:
    model = nn.Transformer(8, 2, 1, 1, 16, batch_first=True)
    return model, (torch.randn(2, 5, 8), torch.randn(2, 4, 8)), {}


def _cache() -> Made:
    from transformers import DynamicCache

    model, inputs = ARCHITECTURES["Llama"]()
    return model, (), {**inputs, "past_key_values": DynamicCache(), "use_cache": True}


#: Small models with one difficulty each.
SMALL: dict[str, Callable[[], Made]] = {
    "MLP": _mlp,
    "LSTM": _lstm,
    "Transformer": _transformer,
    "tied and shared": lambda: (zoo.TiedGPT(layers=2), (tokens() % 17,), {}),
    "recursive": lambda: (zoo.Recursive(), (_x(),), {}),
    "called twice": lambda: (zoo.Twice(), (_x(),), {}),
    "two parents": lambda: (zoo.TwoParents(), (_x(),), {}),
    "unregistered": lambda: (zoo.Hidden(), (_x(),), {}),
    "write through select": _calls(_write_through_select),
    "write through view": _calls(_write_through_view),
    "write through transpose": _calls(_write_through_transpose),
    "write to .data": _calls(_write_to_data),
    "out= and foreach": _calls(_out_argument),
    "conjugates": _calls(_fourier),
    "custom Function": _calls(lambda model, x: model.two(Double.apply(model.one(x)))),
    "dict": lambda: (zoo.Structured("dict"), (), {"x": _x()}),
    "dataclass": _calls(lambda model, x: Answer(model.one(x), [model.two(x)])),
    "None": lambda: (zoo.Structured("none"), (), {"x": _x()}),
    "Cache": _cache,
    "gradient inside": _calls(_gradient_inside),
    "autocast": _calls(_autocast),
    "non-reentrant": _calls(_checkpointed(False)),
    "reentrant": _calls(_checkpointed(True)),
    "batch norm": lambda: (nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.BatchNorm1d(4)), (_x(),), {}),
    "evaluation": lambda: (
        nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Dropout()).eval(),
        (_x(),),
        {},
    ),
}
