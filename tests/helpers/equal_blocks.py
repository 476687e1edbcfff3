"""Blocks of models in two ways of writing, which compute the same but for rounding."""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

WIDTH, HEADS, TIME = 16, 4, 5

Block = Callable[["Around", torch.Tensor], torch.Tensor]


class Around(nn.Module):
    """A block between two linear layers, and the modules that it may call."""

    def __init__(self, block: Block) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.into, self.out, self.qkv = (
            nn.Linear(WIDTH, WIDTH),
            nn.Linear(WIDTH, WIDTH),
            nn.Linear(WIDTH, 3 * WIDTH),
        )
        self.norm, self.lstm = nn.LayerNorm(WIDTH), nn.LSTM(WIDTH, WIDTH, batch_first=True)
        self.conv = nn.Conv1d(WIDTH, WIDTH, 3, padding=1)
        self.block = block
        with torch.no_grad():
            for parameter in self.parameters():
                if parameter.dim() == 1:
                    parameter.normal_()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.out(self.block(self, self.into(x)))


def split_heads(net: Around, x: torch.Tensor) -> list[torch.Tensor]:
    return [each.unflatten(-1, (HEADS, -1)).transpose(1, 2) for each in net.qkv(x).split(WIDTH, -1)]


def join_heads(y: torch.Tensor) -> torch.Tensor:
    return y.transpose(1, 2).flatten(2)


def scores(q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
    return q @ k.mT / (WIDTH // HEADS) ** 0.5


def attend(net: Around, x: torch.Tensor) -> torch.Tensor:
    q, k, v = split_heads(net, x)
    return join_heads(scores(q, k).softmax(-1) @ v)


def attend_fused(net: Around, x: torch.Tensor, **options: Any) -> torch.Tensor:
    return join_heads(F.scaled_dot_product_attention(*split_heads(net, x), **options))


def attend_masked(net: Around, x: torch.Tensor, lowest: float) -> torch.Tensor:
    q, k, v = split_heads(net, x)
    future = torch.ones(TIME, TIME, dtype=torch.bool).triu(1)
    added = torch.zeros(TIME, TIME, dtype=x.dtype).masked_fill(future, lowest)
    return join_heads((scores(q, k) + added).softmax(-1) @ v)


def attend_by_einsum(net: Around, x: torch.Tensor) -> torch.Tensor:
    q, k, v = split_heads(net, x)
    weights = (torch.einsum("bhqd,bhkd->bhqk", q, k) / (WIDTH // HEADS) ** 0.5).softmax(-1)
    return join_heads(torch.einsum("bhqk,bhkd->bhqd", weights, v))


def normalize_rows(net: Around, x: torch.Tensor) -> torch.Tensor:
    centered = x - x.mean(-1, keepdim=True)
    return (
        centered * (centered.square().mean(-1, keepdim=True) + 1e-5).rsqrt() * net.norm.weight + net.norm.bias
    )


def recur_by_hand(net: Around, x: torch.Tensor) -> torch.Tensor:
    lstm, states = net.lstm, []
    hidden = cell = x.new_zeros(len(x), WIDTH)
    for now in x.unbind(1):
        gates = F.linear(now, lstm.weight_ih_l0, lstm.bias_ih_l0)
        gates = gates + F.linear(hidden, lstm.weight_hh_l0, lstm.bias_hh_l0)
        enter, keep, new, show = gates.chunk(4, -1)
        cell = keep.sigmoid() * cell + enter.sigmoid() * new.tanh()
        hidden = show.sigmoid() * cell.tanh()
        states.append(hidden)
    return torch.stack(states, 1)


def recur_by_step(net: Around, x: torch.Tensor) -> torch.Tensor:
    state, outputs = None, []
    for now in x.split(1, 1):
        output, state = net.lstm(now, state)
        outputs.append(output)
    return torch.cat(outputs, 1)


def convolve_windows(net: Around, x: torch.Tensor) -> torch.Tensor:
    windows = F.pad(x, (0, 0, 1, 1)).unfold(1, 3, 1)
    return torch.einsum("btcw,ocw->bto", windows, net.conv.weight) + net.conv.bias


def add_up(_: Around, x: torch.Tensor) -> torch.Tensor:
    sums = [x[:, 0]]
    for now in x.unbind(1)[1:]:
        sums.append(sums[-1] + now)
    return torch.stack(sums, 1)


#: By name: a block, and the same written in another way.
EQUAL_BLOCKS: dict[str, tuple[Block, Block]] = {
    "fused attention": (attend_fused, attend),
    "fused causal attention": (
        lambda net, x: attend_fused(net, x, is_causal=True),
        lambda net, x: attend_masked(net, x, float("-inf")),
    ),
    "lowest number for -inf": (
        lambda net, x: attend_masked(net, x, float("-inf")),
        lambda net, x: attend_masked(net, x, torch.finfo(x.dtype).min),
    ),
    "batch in a loop": (attend, lambda net, x: torch.cat([attend(net, each) for each in x.split(1)])),
    "einsum": (attend, attend_by_einsum),
    "checkpoint": (attend, lambda net, x: checkpoint(attend, net, x, use_reentrant=False)),
    "LayerNorm": (lambda net, x: net.norm(x), normalize_rows),
    "LSTM by hand": (lambda net, x: net.lstm(x)[0], recur_by_hand),
    "LSTM step by step": (lambda net, x: net.lstm(x)[0], recur_by_step),
    "convolution of windows": (lambda net, x: net.conv(x.mT).mT, convolve_windows),
    "time first": (
        lambda net, x: net.norm(net.conv(x.mT).mT).relu(),
        lambda net, x: net.norm(net.conv(x.mT).permute(2, 0, 1)).relu().transpose(0, 1),
    ),
    "order of a sum": (lambda _, x: x + x.sin() + x.cos(), lambda _, x: x + (x.sin() + x.cos())),
    "GELU": (lambda _, x: F.gelu(x), lambda _, x: 0.5 * x * (1 + (x / 2**0.5).erf())),
    "SiLU": (lambda _, x: F.silu(x), lambda _, x: x * x.sigmoid()),
    "log_softmax": (lambda _, x: x.log_softmax(-1), lambda _, x: x - x.logsumexp(-1, keepdim=True)),
    "variance": (
        lambda _, x: x * x.var(-1, keepdim=True),
        lambda _, x: (
            x
            * (x.square().mean(-1, keepdim=True) - x.mean(-1, keepdim=True).square())
            * (WIDTH / (WIDTH - 1))
        ),
    ),
    "in place": (lambda _, x: x.clone().mul_(2).add_(1).relu_(), lambda _, x: (x * 2 + 1).relu()),
    "gather": (
        lambda _, x: x.gather(1, torch.tensor([2, 0, 1])[None, :, None].expand(len(x), 3, WIDTH)),
        lambda _, x: x[:, [2, 0, 1]],
    ),
    "cumulative sum": (lambda _, x: x.cumsum(1), add_up),
}
