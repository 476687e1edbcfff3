"""Two families of models that train for a few steps, each healthy or with one thing wrong with it."""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import modtrace

#: Changes how the model calls one of its blocks: given the block and its input, returns its output.
CallBlock = Callable[[nn.Module, torch.Tensor], torch.Tensor]


class _Attention(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(x).chunk(3, -1)
        attended = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return x + self.out(attended)


class _Recurrent(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.cell = nn.GRU(width, width, batch_first=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.cell(x)[0]


class Stack(nn.Module):
    """An embedding, three equal blocks and a head; `call_block` may call a block otherwise."""

    def __init__(self, block: type[nn.Module], width: int = 16, words: int = 30) -> None:
        super().__init__()
        self.embed = nn.Embedding(words, width)
        self.blocks = nn.ModuleList(block(width) for _ in range(3))
        self.head = nn.Linear(width, words)
        self.call_block: dict[int, CallBlock] = {}

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        for number, block in enumerate(self.blocks):
            x = self.call_block.get(number, _call)(block, x)
        return self.head(x)


def _call(block: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return block(x)


FAMILIES: dict[str, type[nn.Module]] = {"attention": _Attention, "recurrent": _Recurrent}


def train(model: nn.Module, *, parameters: Any = None, steps: int = 5, **options: Any) -> modtrace.Recording:
    """Returns the recording of some training steps; `parameters` are those of the optimizer, by default all."""
    optimizer = torch.optim.AdamW(model.parameters() if parameters is None else parameters, lr=1e-3)
    with modtrace.record(model, strict=True, **options) as rec:
        for _ in range(steps):
            tokens = torch.randint(0, 30, (2, 6))
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten()).backward()
            optimizer.step()
    return rec


def without_grad(block: nn.Module, x: torch.Tensor) -> torch.Tensor:
    """Calls a block in a residual branch without gradients."""
    with torch.no_grad():
        return x + block(x)


def behind_detach(block: nn.Module, x: torch.Tensor) -> torch.Tensor:
    """Cuts the graph before a block."""
    return block(x.detach())


def in_reentrant_checkpoint(block: nn.Module, x: torch.Tensor) -> torch.Tensor:
    """Checkpoints a block; no gradient passes if the input requires none."""
    return checkpoint(block, x, use_reentrant=True)


def skipped(block: nn.Module, x: torch.Tensor) -> torch.Tensor:
    """Leaves a block out."""
    return x


def beside(block: nn.Module, x: torch.Tensor) -> torch.Tensor:
    """Calls a block, and throws away what it returns."""
    block(x)
    return x
