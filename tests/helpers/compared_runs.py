"""Recordings of a small GPT before and after a change, for pages that show the difference of two runs."""

from collections.abc import Callable, Mapping
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn

import modtrace
from helpers.report_runs import record_as_script, train_gpt

WIDTH, HEADS, CONTEXT, LAYERS = 32, 2, 32, 4
_CAPTURE = modtrace.Capture(
    roles=["output", "op_output", "leaf", "parameter", "parameter_grad"], hash=True, sketch=True
)


class NormedMLP(train_gpt.MLP):
    """The MLP of the example with a norm behind the activation."""

    def __init__(self, width: int) -> None:
        super().__init__(width)
        with torch.random.fork_rng():
            self.norm = nn.LayerNorm(4 * width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.proj(self.norm(self.gelu(self.fc(x))))


class PortedAttention(train_gpt.Attention):
    """The attention of the example with other names."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__(width, heads)
        self.in_proj, self.out_proj = self.qkv, self.proj
        del self.qkv, self.proj

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, width = x.shape
        qkv = self.in_proj(x).view(batch, length, 3, self.heads, width // self.heads)
        q, k, v = qkv.permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out_proj(mixed.transpose(1, 2).reshape(batch, length, width))


class PortedBlock(nn.Module):
    """The block of the example with other names."""

    def __init__(self) -> None:
        super().__init__()
        self.norm_1, self.self_attn = nn.LayerNorm(WIDTH), PortedAttention(WIDTH, HEADS)
        self.norm_2, self.feed_forward = nn.LayerNorm(WIDTH), train_gpt.MLP(WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.self_attn(self.norm_1(x))
        return x + self.feed_forward(self.norm_2(x))


class PortedGPT(nn.Module):
    """The GPT of the example with other names and the weights of another one; its third activation is a ReLU."""

    def __init__(self, original: nn.Module) -> None:
        super().__init__()
        vocabulary = original.token_embedding.num_embeddings
        self.wte, self.wpe = nn.Embedding(vocabulary, WIDTH), nn.Embedding(CONTEXT, WIDTH)
        self.layers = nn.ModuleList(PortedBlock() for _ in range(LAYERS))
        self.norm, self.lm_head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, vocabulary, bias=False)
        self.lm_head.weight = self.wte.weight
        with torch.no_grad():
            for one, other in zip(self.parameters(), original.parameters(), strict=True):
                one.copy_(other)
        self.layers[2].feed_forward.gelu = nn.GELU(approximate="tanh")

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.wte(tokens) + self.wpe(torch.arange(tokens.shape[1], device=tokens.device))
        for layer in self.layers:
            x = layer(x)
        return self.lm_head(self.norm(x))


def make_gpt(layers: int = LAYERS) -> nn.Module:
    """The GPT of the example, with the same weights each time."""
    torch.manual_seed(0)
    vocabulary = len(train_gpt.Text().characters)
    return train_gpt.GPT(vocabulary, layers=layers, width=WIDTH, heads=HEADS, context=CONTEXT)


def _change_eps(model: nn.Module) -> nn.Module:
    model.blocks[1].ln2.eps = 1e-2
    return model


def _add_norm(model: nn.Module) -> nn.Module:
    old, model.blocks[2].mlp = model.blocks[2].mlp, NormedMLP(WIDTH)
    model.blocks[2].mlp.load_state_dict(old.state_dict(), strict=False)
    return model


def _add_block(model: nn.Module) -> nn.Module:
    model.blocks.append(make_gpt(LAYERS + 1).blocks[LAYERS])
    return model


#: How the second run of each pair is made of the first one's model.
CHANGES: Mapping[str, Callable[[nn.Module], nn.Module]] = {
    "equal": lambda model: model,
    "eps": _change_eps,
    "added": _add_norm,
    "block": _add_block,
    "port": PortedGPT,
}


def record_changed(to: Path, change: str = "equal", *, steps: int = 2) -> None:
    """Records a GPT with one of `CHANGES` while it trains on the same batches each time."""
    model = CHANGES[change](make_gpt())
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    torch.manual_seed(1)
    text = train_gpt.Text()
    model(text.batch(2, CONTEXT)[0])  # what is made once, such as memory, is not in the times
    torch.manual_seed(1)
    with record_as_script(model, to, values=_CAPTURE) as rec:
        for _ in range(steps):
            tokens, targets = text.batch(2, CONTEXT)
            loss = F.cross_entropy(model(tokens).flatten(0, 1), targets.flatten())
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            rec.log(loss=loss)
