"""Gemma ported by hand, with faults that are switched on."""

import torch
from torch import nn


class Norm(nn.Module):
    """A norm by the root mean square, which multiplies with the weight and 1 before it rounds."""

    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.weight, self.eps, self.is_rounded_early = nn.Parameter(torch.ones(width)), eps, False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        wide = x.float()
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.eps)
        if self.is_rounded_early:
            return (wide.bfloat16() * (1.0 + self.weight.bfloat16())).to(x.dtype)
        return (wide * (1.0 + self.weight.float())).to(x.dtype)


class Rotary(nn.Module):
    def __init__(self, size: int, theta: float, is_rounded: bool) -> None:
        super().__init__()
        self.is_rounded = is_rounded
        self.inverse = nn.Buffer(
            1.0 / (theta ** (torch.arange(0, size, 2, dtype=torch.float) / size)), persistent=False
        )

    def forward(self, x: torch.Tensor, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        places = positions.bfloat16().float() if self.is_rounded else positions.float()
        angles = places[..., None] * self.inverse.float()
        angles = torch.cat((angles, angles), dim=-1)
        return angles.cos().to(x.dtype), angles.sin().to(x.dtype)


def turn_halves(x: torch.Tensor) -> torch.Tensor:
    first, second = x.chunk(2, dim=-1)
    return torch.cat((-second, first), dim=-1)


class Attention(nn.Module):
    def __init__(self, config) -> None:
        super().__init__()
        self.size, width = config.head_dim, config.hidden_size
        self.groups = config.num_attention_heads // config.num_key_value_heads
        self.q = nn.Linear(width, config.num_attention_heads * self.size, bias=False)
        self.k = nn.Linear(width, config.num_key_value_heads * self.size, bias=False)
        self.v = nn.Linear(width, config.num_key_value_heads * self.size, bias=False)
        self.o = nn.Linear(config.num_attention_heads * self.size, width, bias=False)

    def forward(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        batch, time, _ = x.shape
        q, k, v = (
            project(x).view(batch, time, -1, self.size).transpose(1, 2)
            for project in (self.q, self.k, self.v)
        )
        q = q * cos + turn_halves(q) * sin
        k = k * cos + turn_halves(k) * sin
        k, v = k.repeat_interleave(self.groups, 1), v.repeat_interleave(self.groups, 1)
        scores = (q @ k.mT) * self.size**-0.5
        future = torch.ones(time, time, dtype=torch.bool).triu(1)
        shares = scores.masked_fill(future, torch.finfo(x.dtype).min).softmax(-1, dtype=torch.float32)
        return self.o((shares.to(x.dtype) @ v).transpose(1, 2).reshape(batch, time, -1))


class FeedForward(nn.Module):
    def __init__(self, config, gelu: str) -> None:
        super().__init__()
        width, inner = config.hidden_size, config.intermediate_size
        self.gate, self.up = nn.Linear(width, inner, bias=False), nn.Linear(width, inner, bias=False)
        self.act = nn.GELU(approximate=gelu)
        self.down = nn.Linear(inner, width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(self.act(self.gate(x)) * self.up(x))


class Block(nn.Module):
    def __init__(self, config, gelu: str) -> None:
        super().__init__()
        self.norm1, self.attn = Norm(config.hidden_size, config.rms_norm_eps), Attention(config)
        self.norm2, self.ff = Norm(config.hidden_size, config.rms_norm_eps), FeedForward(config, gelu)

    def forward(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        x = x + self.attn(self.norm1(x), cos, sin)
        return x + self.ff(self.norm2(x))


class ScaledEmbedding(nn.Embedding):
    """The root of its width has to be taken in float32."""

    is_rounded = False

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        scale = torch.tensor(self.embedding_dim**0.5)
        scale = scale.bfloat16() if self.is_rounded else scale
        return super().forward(tokens) * scale.to(self.weight.dtype)


class PortedGemma(nn.Module):
    """A Gemma by a config of transformers; `fault` is None, `embed scale`, `norm`, `positions` or `gelu`."""

    def __init__(self, config, fault: str | None = None) -> None:
        super().__init__()
        self.embed = ScaledEmbedding(config.vocab_size, config.hidden_size)
        self.embed.is_rounded = fault == "embed scale"
        self.rotary = Rotary(
            config.head_dim, config.rope_parameters["rope_theta"], is_rounded=fault == "positions"
        )
        self.layers = nn.ModuleList(
            Block(config, "none" if fault == "gelu" else "tanh") for _ in range(config.num_hidden_layers)
        )
        self.norm = Norm(config.hidden_size, config.rms_norm_eps)
        self.head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.head.weight = self.embed.weight
        for module in self.modules():
            if isinstance(module, Norm):
                module.is_rounded_early = fault == "norm"

    def forward(self, tokens: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        cos, sin = self.rotary(x, positions)
        for layer in self.layers:
            x = layer(x, cos[:, None], sin[:, None])
        return self.head(self.norm(x))

    @torch.no_grad()
    def load(self, original: nn.Module) -> "PortedGemma":
        """Copies the weights of a transformers model, and returns self in evaluation mode."""
        theirs = original.state_dict()
        for name, ours in self.state_dict().items():
            ours.copy_(theirs[_their_name(name)])
        return self.eval()


#: Parts of our paths, and transformers' for them.
NAMES = {
    "embed": "model.embed_tokens", "rotary": "model.rotary_emb", "layers": "model.layers", "norm": "model.norm",
    "head": "lm_head", "norm1": "input_layernorm", "norm2": "post_attention_layernorm", "attn": "self_attn",
    "q": "q_proj", "k": "k_proj", "v": "v_proj", "o": "o_proj", "ff": "mlp", "gate": "gate_proj", "up": "up_proj",
    "down": "down_proj",
}  # fmt: skip


def _their_name(name: str) -> str:
    return ".".join(NAMES.get(part, part) for part in name.split("."))


#: The rules with which a user tells what became of the modules of transformers' Gemma.
RULES = [
    r"model\.embed_tokens=embed",
    r"model\.rotary_emb=rotary",
    r"model\.norm=norm",
    r"lm_head=head",
    r"model\.layers\.(\d+)=layers.\1",
    r"model\.layers\.(\d+)\.input_layernorm=layers.\1.norm1",
    r"model\.layers\.(\d+)\.post_attention_layernorm=layers.\1.norm2",
    r"model\.layers\.(\d+)\.self_attn=layers.\1.attn",
    r"model\.layers\.(\d+)\.self_attn\.(\w)_proj=layers.\1.attn.\2",
    r"model\.layers\.(\d+)\.mlp=layers.\1.ff",
    r"model\.layers\.(\d+)\.mlp\.(\w+)_proj=layers.\1.ff.\2",
    r"model\.layers\.(\d+)\.mlp\.act_fn=layers.\1.ff.act",
]
