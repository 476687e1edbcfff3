"""Distils a compiled teacher into a smaller student that imitates its attention.

    python examples/distill.py
    python examples/distill.py --backend eager --steps 20

The teacher is one graph of `torch.compile(fullgraph=True)`, in whose middle nothing can be hooked: `modtrace.track`
with `compiled="inside"` brings what the attention of each block returns. The student is tracked too, with the tensors
themselves (`stash_value`), so that their loss has a gradient. Each block of the student learns to return what one
block of the teacher returns, beside the teacher's logits.

Both are GPTs of bytes; the teacher learns Python's own documentation for some seconds first.
"""

import argparse
from collections.abc import Sequence
from pydoc_data.topics import topics
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import modtrace
from modtrace.tensor_tracker import Tracker

ATTENTION = "blocks.*.attention"


class Attention(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.split = nn.Linear(width, 3 * width)
        self.join = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        query, key, value = self.split(x).view(batch, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        seen = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        return self.join(seen.transpose(1, 2).reshape(batch, length, width))


class Block(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.before_attention, self.before_mlp = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention = Attention(width, heads)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.before_attention(x))
        return x + self.mlp(self.before_mlp(x))


class GPT(nn.Module):
    """Predicts the next byte."""

    def __init__(self, layers: int, width: int, context: int) -> None:
        super().__init__()
        self.byte, self.position = nn.Embedding(256, width), nn.Embedding(context, width)
        self.blocks = nn.ModuleList(Block(width, heads=4) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, 256)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.byte(tokens) + self.position.weight[: tokens.shape[1]]
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def read_text() -> Tensor:
    """The documentation of Python's statements and types as bytes."""
    return torch.frombuffer(bytearray("\n".join(topics.values()).encode()), dtype=torch.uint8).long()


def batch_of(text: Tensor, size: int, length: int) -> Tensor:
    """Passages from random places."""
    starts = torch.randint(len(text) - length, (size, 1))
    return text[starts + torch.arange(length)]


def teach(teacher: nn.Module, text: Tensor, steps: int, context: int) -> None:
    """Has the teacher learn to predict the next byte."""
    optimizer = torch.optim.AdamW(teacher.parameters(), lr=2e-3)
    for _ in range(steps):
        tokens = batch_of(text, 16, context + 1)
        optimizer.zero_grad()
        F.cross_entropy(teacher(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten()).backward()
        optimizer.step()


class Losses(NamedTuple):
    """What the student is to make small."""

    attention: float  # mean squared difference of what attention returns, over the teacher's mean square
    logits: float  # Kullback-Leibler divergence of the next byte, in nats


def distill(teacher: GPT, student: GPT, text: Tensor, steps: int, context: int, backend: str) -> list[Losses]:
    """Trains the student, and returns the losses of each step."""
    teacher.requires_grad_(False)
    compiled = torch.compile(teacher, backend=backend, fullgraph=True)
    optimizer = torch.optim.AdamW(student.parameters(), lr=2e-3)
    every = len(teacher.blocks) // len(student.blocks)
    found: list[Losses] = []
    theirs = modtrace.track(
        teacher, include=ATTENTION, match="glob", grad=False, stash_value=lambda t: t, compiled="inside"
    )
    mine = modtrace.track(student, include=ATTENTION, match="glob", grad=False, stash_value=lambda t: t)
    with theirs, mine:
        for _ in range(steps):
            tokens = batch_of(text, 16, context)
            wanted = F.log_softmax(compiled(tokens), -1)
            given = F.log_softmax(student(tokens), -1)
            attention = difference(take(mine), take(theirs)[every - 1 :: every])
            logits = F.kl_div(given, wanted, log_target=True, reduction="none").sum(-1).mean()
            optimizer.zero_grad()
            (attention + logits).backward()
            optimizer.step()
            found.append(Losses(attention.item(), logits.item()))
    return found


def take(tracker: Tracker) -> list[Tensor]:
    """What the attention of each block has returned since this was asked last."""
    taken = [stash.value for stash in tracker]
    tracker.clear()
    return taken


def difference(mine: Sequence[Tensor], theirs: Sequence[Tensor]) -> Tensor:
    """The mean squared difference, as a share of their mean square."""
    return torch.stack(
        [F.mse_loss(one, other) / other.pow(2).mean() for one, other in zip(mine, theirs, strict=True)]
    ).mean()


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=100, help="of the student, and of the teacher before")
    parser.add_argument("--layers", type=int, default=4, help="of the teacher; the student has half as many")
    parser.add_argument("--width", type=int, default=96)
    parser.add_argument("--context", type=int, default=64, help="bytes in a passage")
    parser.add_argument(
        "--backend", default="inductor", help="of torch.compile: inductor, aot_eager or eager"
    )
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> None:
    args = parse(argv)
    torch.manual_seed(0)
    text = read_text()
    teacher = GPT(args.layers, args.width, args.context)
    student = GPT(args.layers // 2, args.width, args.context)
    teach(teacher, text, args.steps, args.context)
    losses = distill(teacher, student, text, args.steps, args.context, args.backend)
    for step in sorted({0, args.steps // 4, args.steps // 2, args.steps - 1}):
        print(f"step {step}: attention {losses[step].attention:.3f}, logits {losses[step].logits:.3f}")


if __name__ == "__main__":
    main()
