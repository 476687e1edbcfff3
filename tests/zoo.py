"""Small models with one difficulty each."""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint


class Attention(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(width, 3 * width)
        self.proj = nn.Linear(width, width)
        self.drop = nn.Dropout(0.1)

    def forward(self, x):
        batch, time, width = x.shape
        q, k, v = self.qkv(x).view(batch, time, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.drop(self.proj(y.transpose(1, 2).reshape(batch, time, width)))


class Block(nn.Module):
    """Calls a Linear that all blocks share, and works in place."""

    def __init__(self, width: int, heads: int, shared: nn.Module) -> None:
        super().__init__()
        self.ln1 = nn.LayerNorm(width)
        self.attn = Attention(width, heads)
        self.ln2 = nn.LayerNorm(width)
        self.fc = nn.Linear(width, 2 * width)
        self.act = nn.ReLU(inplace=True)
        self.proj = nn.Linear(2 * width, width)
        self.shared = shared

    def forward(self, x):
        x = x + self.attn(self.ln1(x))
        x = x + self.proj(self.act(self.fc(self.ln2(x))))
        return self.shared(x).mul_(0.5) + x


class TiedGPT(nn.Module):
    """A GPT with a tied embedding, one Linear shared by all blocks, in-place ops, dropout and SDPA."""

    def __init__(self, vocabulary=17, width=16, heads=2, layers=4, time=8) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocabulary, width)
        self.position = nn.Parameter(torch.randn(time, width) * 0.02)
        shared = nn.Linear(width, width)
        self.blocks = nn.ModuleList(Block(width, heads, shared) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens, reentrant: bool | None = None):
        x = self.embed(tokens) + self.position
        for block in self.blocks:
            x = block(x) if reentrant is None else checkpoint(block, x, use_reentrant=reentrant)
        return self.head(self.norm(x))


class Twice(nn.Module):
    """Calls one module twice."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x):
        return self.layer(self.layer(x).tanh())


class Recursive(nn.Module):
    """Calls itself."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x, depth: int = 2):
        x = self.layer(x)
        return self(x, depth - 1) if depth else x


class TwoParents(nn.Module):
    """One module registered in two others; each runs it."""

    def __init__(self) -> None:
        super().__init__()
        shared = nn.Linear(4, 4)
        self.x = nn.Sequential(shared)
        self.y = nn.Sequential(shared, nn.Tanh())

    def forward(self, value):
        return self.y(self.x(value))


class Hidden(nn.Module):
    """Runs modules from a plain list, and one made anew in each forward."""

    def __init__(self) -> None:
        super().__init__()
        self.hidden = [nn.Linear(4, 4), nn.Linear(4, 4)]

    def forward(self, x):
        for layer in self.hidden:
            x = layer(x)
        return nn.Softmax(dim=-1)(x)


class Late(nn.Module):
    """Gains a child between two forwards."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)

    def forward(self, x):
        x = self.first(x)
        return self.late(x) if hasattr(self, "late") else x


class Encoder(nn.Module):
    """Has an entry point that bypasses hooks."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(4, 4), nn.ReLU())

    def encode(self, x):
        return self.inner(x)

    def forward(self, x):
        return self.encode(x) * 2


class Failing(nn.Module):
    """Raises what it is told to, from its second child."""

    def __init__(self, error: BaseException | None = None) -> None:
        super().__init__()
        self.error = error
        self.first = nn.Linear(4, 4)
        self.second = _Raiser(self)

    def forward(self, x):
        return self.second(self.first(x))


class _Raiser(nn.Module):
    def __init__(self, owner: Failing) -> None:
        super().__init__()
        self.__dict__["owner"] = owner

    def forward(self, x):
        if self.owner.error is not None:
            raise self.owner.error
        return x + 1


@dataclass
class Pair:
    first: torch.Tensor
    second: torch.Tensor | None = None


class Structured(nn.Module):
    """Takes keyword arguments and gives a dataclass, a dict or None."""

    def __init__(self, kind: str = "dataclass") -> None:
        super().__init__()
        self.kind = kind
        self.layer = nn.Linear(4, 4)

    def forward(self, *, x):
        y = self.layer(x)
        if self.kind == "dict":
            return {"y": y, "nested": [y * 2, None]}
        if self.kind == "none":
            self.stashed = y.sum()
            return None
        return Pair(y)
