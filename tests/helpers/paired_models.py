"""A small GPT in the variants that users compare: attention and checkpoints, and a copy of AdamW."""

import math
from collections.abc import Iterable

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

WIDTH, HEADS, TIME, TOKENS = 16, 2, 8, 24


class Attention(nn.Module):
    """Causal attention by SDPA, or written out."""

    def __init__(self, is_written: bool = False) -> None:
        super().__init__()
        self.is_written, self.scale = is_written, math.sqrt(HEADS / WIDTH)
        self.qkv, self.proj = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def project(self, x: torch.Tensor) -> Iterable[torch.Tensor]:
        return self.qkv(x).chunk(3, -1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, time, width = x.shape
        q, k, v = (each.view(batch, time, HEADS, -1).transpose(1, 2) for each in self.project(x))
        y = (
            self.attend(q, k, v)
            if self.is_written
            else F.scaled_dot_product_attention(q, k, v, is_causal=True)
        )
        return self.proj(y.transpose(1, 2).reshape(batch, time, width))

    def attend(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        future = torch.ones(TIME, TIME, dtype=torch.bool).triu(1)
        return (q @ k.mT * self.scale).masked_fill(future, -math.inf).softmax(-1) @ v


class ThreeProjections(Attention):
    """The same attention with three projections instead of a fused one."""

    def __init__(self) -> None:
        super().__init__()
        fused = self.qkv
        del self.qkv
        with torch.random.fork_rng():
            self.q, self.k, self.v = (nn.Linear(WIDTH, WIDTH) for _ in range(3))
        with torch.no_grad():
            for number, each in enumerate((self.q, self.k, self.v)):
                each.weight.copy_(fused.weight.chunk(3)[number])
                each.bias.copy_(fused.bias.chunk(3)[number])

    def project(self, x: torch.Tensor) -> Iterable[torch.Tensor]:
        return self.q(x), self.k(x), self.v(x)


class Block(nn.Module):
    def __init__(self, attention: nn.Module, dropout: float) -> None:
        super().__init__()
        self.norm1, self.attn, self.norm2 = nn.LayerNorm(WIDTH), attention, nn.LayerNorm(WIDTH)
        self.fc, self.act, self.out = nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH)
        self.drop = nn.Dropout(dropout)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attn(self.norm1(x))
        return x + self.drop(self.out(self.act(self.fc(self.norm2(x)))))


class GPT(nn.Module):
    """Embeds tokens and positions, runs two blocks, under checkpoints if asked, and a head."""

    def __init__(self, attention: str = "sdpa", *, dropout: float = 0.0, width_of_head: int = TOKENS) -> None:
        super().__init__()
        self.embed, self.place = nn.Embedding(TOKENS, WIDTH), nn.Embedding(TIME, WIDTH)
        kinds = {"sdpa": Attention, "written": lambda: Attention(is_written=True), "three": ThreeProjections}
        self.blocks = nn.ModuleList(Block(kinds[attention](), dropout) for _ in range(2))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, width_of_head, bias=False)
        self.is_checkpointed, self.keeps_rng = False, True

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens) + self.place(torch.arange(tokens.shape[1]))
        for block in self.blocks:
            x = self.run(block, x)
        return self.head(self.norm(x).to(self.head.weight.dtype))

    def run(self, block: nn.Module, x: torch.Tensor) -> torch.Tensor:
        if not self.is_checkpointed:
            return block(x)
        return checkpoint(block, x, use_reentrant=False, preserve_rng_state=self.keeps_rng)


class CopiedAdamW(torch.optim.Optimizer):
    """AdamW written by hand. With `is_corrected=False` it lacks the correction of the first steps' averages."""

    def __init__(self, parameters: Iterable[nn.Parameter], lr: float, *, is_corrected: bool = True) -> None:
        super().__init__(parameters, {"lr": lr})
        self.is_corrected, self.count = is_corrected, 0

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        self.count += 1
        for group in self.param_groups:
            for parameter in group["params"]:
                self.update(parameter, self.state[parameter], group["lr"])

    def update(self, parameter: torch.Tensor, state: dict[str, torch.Tensor], lr: float) -> None:
        grad = parameter.grad
        state["mean"] = 0.9 * state.get("mean", torch.zeros_like(grad)) + 0.1 * grad
        state["square"] = 0.999 * state.get("square", torch.zeros_like(grad)) + 0.001 * grad * grad
        mean, square = state["mean"], state["square"]
        if self.is_corrected:
            mean, square = mean / (1 - 0.9**self.count), square / (1 - 0.999**self.count)
        parameter.mul_(1 - lr * 0.01)
        parameter.sub_(lr * mean / (square.sqrt() + 1e-8))
