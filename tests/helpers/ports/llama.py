"""Llama and Gemma ported by hand, with faults that are switched on."""

import torch
from torch import nn


class RMSNorm(nn.Module):
    """Llama's norm; Gemma's multiplies with the weight and 1, before it rounds."""

    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.ones(width)), eps

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        wide = x.float()
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.eps)
        return self.weight * wide.to(x.dtype)


class GemmaNorm(RMSNorm):
    is_rounded_early = False

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


def turn_neighbours(x: torch.Tensor) -> torch.Tensor:
    """The other convention for pairs of a rotation: neighbours instead of halves."""
    return torch.stack((-x[..., 1::2], x[..., ::2]), dim=-1).flatten(-2)


class Attention(nn.Module):
    def __init__(self, config, fault: str | None) -> None:
        super().__init__()
        self.size, width = config.head_dim, config.hidden_size
        self.groups = config.num_attention_heads // config.num_key_value_heads
        self.q = nn.Linear(width, config.num_attention_heads * self.size, bias=False)
        self.k = nn.Linear(width, config.num_key_value_heads * self.size, bias=False)
        self.v = nn.Linear(width, config.num_key_value_heads * self.size, bias=False)
        self.o = nn.Linear(config.num_attention_heads * self.size, width, bias=False)
        self.turn = turn_neighbours if fault == "rotary" else turn_halves
        self.scale = None if fault == "scale" else self.size**-0.5

    def forward(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        batch, time, _ = x.shape
        q, k, v = (
            project(x).view(batch, time, -1, self.size).transpose(1, 2)
            for project in (self.q, self.k, self.v)
        )
        q = q * cos + self.turn(q) * sin
        k = k * cos + self.turn(k) * sin
        k, v = k.repeat_interleave(self.groups, 1), v.repeat_interleave(self.groups, 1)
        scores = q @ k.mT if self.scale is None else (q @ k.mT) * self.scale
        future = torch.ones(time, time, dtype=torch.bool).triu(1)
        shares = scores.masked_fill(future, torch.finfo(x.dtype).min).softmax(-1, dtype=torch.float32)
        return self.o((shares.to(x.dtype) @ v).transpose(1, 2).reshape(batch, time, -1))


class FeedForward(nn.Module):
    def __init__(self, config, gelu: str | None) -> None:
        super().__init__()
        width, inner = config.hidden_size, config.intermediate_size
        self.gate, self.up = nn.Linear(width, inner, bias=False), nn.Linear(width, inner, bias=False)
        self.act = nn.SiLU() if gelu is None else nn.GELU(approximate=gelu)
        self.down = nn.Linear(inner, width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(self.act(self.gate(x)) * self.up(x))


class Block(nn.Module):
    def __init__(self, config, norm: type[RMSNorm], gelu: str | None, fault: str | None) -> None:
        super().__init__()
        self.norm1 = norm(config.hidden_size, _epsilon(config, fault))
        self.attn = Attention(config, fault)
        self.norm2 = norm(config.hidden_size, _epsilon(config, fault))
        self.ff = FeedForward(config, gelu)

    def forward(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        x = x + self.attn(self.norm1(x), cos, sin)
        return x + self.ff(self.norm2(x))


def _epsilon(config, fault: str | None) -> float:
    return 1e-5 if fault == "epsilon" else config.rms_norm_eps


class ScaledEmbedding(nn.Embedding):
    """Gemma's embedding; the root of its width has to be taken in float32."""

    is_rounded = False

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        scale = torch.tensor(self.embedding_dim**0.5)
        return super().forward(tokens) * (scale.bfloat16() if self.is_rounded else scale).to(
            self.weight.dtype
        )


class PortedLlama(nn.Module):
    """A Llama that reads transformers' configs; `fault` is None, `epsilon`, `rotary` or `scale`."""

    norm_class: type[RMSNorm] = RMSNorm
    embedding_class: type[nn.Embedding] = nn.Embedding

    def __init__(self, config, fault: str | None = None) -> None:
        super().__init__()
        gelu = self.gelu(fault)
        self.embed = self.embedding_class(config.vocab_size, config.hidden_size)
        self.rotary = Rotary(
            config.head_dim, config.rope_parameters["rope_theta"], is_rounded=fault == "positions"
        )
        self.layers = nn.ModuleList(
            Block(config, self.norm_class, gelu, fault) for _ in range(config.num_hidden_layers)
        )
        self.norm = self.norm_class(config.hidden_size, _epsilon(config, fault))
        self.head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)

    @staticmethod
    def gelu(fault: str | None) -> str | None:
        """Returns the kind of GELU; None: SiLU."""
        return None

    def forward(self, tokens: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        cos, sin = self.rotary(x, positions)
        for layer in self.layers:
            x = layer(x, cos[:, None], sin[:, None])
        return self.head(self.norm(x))

    @torch.no_grad()
    def load(self, original: nn.Module) -> "PortedLlama":
        """Copies the weights of a transformers model, and returns self in evaluation mode."""
        theirs = original.state_dict()
        for name, ours in self.state_dict().items():
            ours.copy_(theirs[_their_name(name)])
        return self.eval()


class PortedGemma(PortedLlama):
    """A Gemma; `fault` is one of those of unsloth's list: `embed scale`, `norm`, `positions`, `gelu`."""

    norm_class = GemmaNorm
    embedding_class = ScaledEmbedding

    def __init__(self, config, fault: str | None = None) -> None:
        super().__init__(config, fault)
        self.head.weight = self.embed.weight
        self.embed.is_rounded = fault == "embed scale"
        for module in self.modules():
            if isinstance(module, GemmaNorm):
                module.is_rounded_early = fault == "norm"

    @staticmethod
    def gelu(fault: str | None) -> str | None:
        return "none" if fault == "gelu" else "tanh"


#: Parts of our paths, and transformers' for them.
NAMES = {
    "embed": "model.embed_tokens", "rotary": "model.rotary_emb", "layers": "model.layers", "norm": "model.norm",
    "head": "lm_head", "norm1": "input_layernorm", "norm2": "post_attention_layernorm", "attn": "self_attn",
    "q": "q_proj", "k": "k_proj", "v": "v_proj", "o": "o_proj", "ff": "mlp", "gate": "gate_proj", "up": "up_proj",
    "down": "down_proj",
}  # fmt: skip


def _their_name(name: str) -> str:
    return ".".join(NAMES.get(part, part) for part in name.split("."))


#: The rules with which a user tells what became of the modules of transformers' Llama.
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
