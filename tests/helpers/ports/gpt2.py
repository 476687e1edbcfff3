"""GPT-2 ported by hand, as users port it: other names, Linear instead of Conv1D, and faults that are switched on."""

import torch
import torch.nn.functional as F
from torch import nn


class Attention(nn.Module):
    def __init__(self, width: int, heads: int, dropout: float, sees_future: bool) -> None:
        super().__init__()
        self.heads, self.sees_future = heads, sees_future
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.drop = nn.Dropout(dropout)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, time, width = x.shape
        q, k, v = (
            each.view(batch, time, self.heads, -1).transpose(1, 2) for each in self.qkv(x).split(width, dim=2)
        )
        mask = torch.ones(time, time, dtype=torch.bool).tril(1) if self.sees_future else None
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=mask is None)
        return self.drop(self.out(y.transpose(1, 2).reshape(batch, time, width)))


class MLP(nn.Module):
    def __init__(self, width: int, gelu: str, dropout: float) -> None:
        super().__init__()
        self.up, self.act = nn.Linear(width, 4 * width), nn.GELU(approximate=gelu)
        self.down, self.drop = nn.Linear(4 * width, width), nn.Dropout(dropout)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.drop(self.down(self.act(self.up(x))))


class Block(nn.Module):
    def __init__(self, config, fault: str | None) -> None:
        super().__init__()
        width, dropout = config.n_embd, config.resid_pdrop
        self.norm1 = nn.LayerNorm(width, eps=config.layer_norm_epsilon)
        self.attn = Attention(width, config.n_head, dropout, sees_future=fault == "mask")
        self.norm2 = nn.LayerNorm(width, eps=config.layer_norm_epsilon)
        self.mlp = MLP(width, "none" if fault == "gelu" else "tanh", dropout)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attn(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class PortedGPT2(nn.Module):
    """A GPT-2 by a config of transformers; `fault`: None, `mask`, `gelu`, `dropout`, `untied` or `transposed`."""

    def __init__(self, config, fault: str | None = None) -> None:
        super().__init__()
        self.fault = fault
        self.tok, self.pos = (
            nn.Embedding(config.vocab_size, config.n_embd),
            nn.Embedding(config.n_positions, config.n_embd),
        )
        self.drop = nn.Dropout(config.embd_pdrop)
        self.blocks = nn.ModuleList(Block(config, fault) for _ in range(config.n_layer))
        self.norm = nn.LayerNorm(config.n_embd, eps=config.layer_norm_epsilon)
        self.head = nn.Linear(config.n_embd, config.vocab_size, bias=False)
        if fault != "untied":
            self.head.weight = self.tok.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.drop(self.tok(tokens) + self.pos(torch.arange(tokens.shape[1])))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))

    @torch.no_grad()
    def load(self, original: nn.Module) -> "PortedGPT2":
        """Copies the weights of a transformers model, and returns self in evaluation mode."""
        theirs = original.state_dict()
        for name, ours in self.state_dict().items():
            given = theirs[_their_name(name)]
            is_left = self.fault == "transposed" and name == "blocks.1.attn.out.weight"
            is_turned = name.startswith("blocks.") and given.dim() == 2 and not is_left
            ours.copy_(given.T if is_turned else given)
        self.eval()
        self.blocks[1].attn.drop.train(self.fault == "dropout")
        return self


#: Parts of our paths, and transformers' for them.
NAMES = {
    "tok": "transformer.wte", "pos": "transformer.wpe", "drop": "transformer.drop", "blocks": "transformer.h",
    "norm": "transformer.ln_f", "head": "lm_head", "norm1": "ln_1", "norm2": "ln_2", "qkv": "c_attn", "out": "c_proj",
    "up": "c_fc", "down": "c_proj",
}  # fmt: skip


def _their_name(name: str) -> str:
    return ".".join(NAMES.get(part, part) for part in name.split("."))


#: The rules with which a user tells what became of the modules of transformers' GPT-2.
RULES = [
    r"transformer\.wte=tok",
    r"transformer\.wpe=pos",
    r"transformer\.drop=drop",
    r"transformer\.ln_f=norm",
    r"lm_head=head",
    r"transformer\.h\.(\d+)=blocks.\1",
    r"transformer\.h\.(\d+)\.ln_(\d)=blocks.\1.norm\2",
    r"transformer\.h\.(\d+)\.attn\.c_attn=blocks.\1.attn.qkv",
    r"transformer\.h\.(\d+)\.attn\.c_proj=blocks.\1.attn.out",
    r"transformer\.h\.(\d+)\.attn\.resid_dropout=blocks.\1.attn.drop",
    r"transformer\.h\.(\d+)\.mlp\.c_fc=blocks.\1.mlp.up",
    r"transformer\.h\.(\d+)\.mlp\.c_proj=blocks.\1.mlp.down",
    r"transformer\.h\.(\d+)\.mlp\.dropout=blocks.\1.mlp.drop",
]
