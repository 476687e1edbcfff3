"""BERT ported by hand, with faults that are switched on."""

import torch
from torch import nn


class Embedded(nn.Module):
    def __init__(self, config, epsilon: float) -> None:
        super().__init__()
        width = config.hidden_size
        self.word = nn.Embedding(config.vocab_size, width)
        self.kind = nn.Embedding(config.type_vocab_size, width)
        self.place = nn.Embedding(config.max_position_embeddings, width)
        self.norm = nn.LayerNorm(width, eps=epsilon)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.word(tokens) + self.kind(torch.zeros_like(tokens))
        return self.norm(x + self.place(torch.arange(tokens.shape[1])))


class Attention(nn.Module):
    def __init__(self, config, fault: str | None) -> None:
        super().__init__()
        width = config.hidden_size
        self.heads, self.is_unscaled = config.num_attention_heads, fault == "scale"
        self.q, self.k, self.v = (nn.Linear(width, width) for _ in range(3))

    def forward(self, x: torch.Tensor, added: torch.Tensor | None) -> torch.Tensor:
        batch, time, width = x.shape
        q, k, v = (
            project(x).view(batch, time, self.heads, -1).transpose(1, 2)
            for project in (self.q, self.k, self.v)
        )
        scores = q @ k.mT
        if not self.is_unscaled:
            scores = scores * q.shape[-1] ** -0.5
        if added is not None:
            scores = scores + added
        return (scores.softmax(-1) @ v).transpose(1, 2).reshape(batch, time, width)


class Block(nn.Module):
    def __init__(self, config, epsilon: float, gelu: str, fault: str | None) -> None:
        super().__init__()
        width, inner = config.hidden_size, config.intermediate_size
        self.attn, self.out = Attention(config, fault), nn.Linear(width, width)
        self.norm1 = nn.LayerNorm(width, eps=epsilon)
        self.up, self.act = nn.Linear(width, inner), nn.GELU(approximate=gelu)
        self.down, self.norm2 = nn.Linear(inner, width), nn.LayerNorm(width, eps=epsilon)

    def forward(self, x: torch.Tensor, added: torch.Tensor | None) -> torch.Tensor:
        x = self.norm1(self.out(self.attn(x, added)) + x)
        return self.norm2(self.down(self.act(self.up(x))) + x)


class Head(nn.Module):
    def __init__(self, config, epsilon: float, gelu: str) -> None:
        super().__init__()
        self.dense, self.act = nn.Linear(config.hidden_size, config.hidden_size), nn.GELU(approximate=gelu)
        self.norm = nn.LayerNorm(config.hidden_size, eps=epsilon)
        self.decoder = nn.Linear(config.hidden_size, config.vocab_size)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.decoder(self.norm(self.act(self.dense(x))))


class PortedBert(nn.Module):
    """A BERT for masked words; `fault` is None, `epsilon`, `gelu`, `scale` or `mask` (padding is not masked)."""

    def __init__(self, config, fault: str | None = None) -> None:
        super().__init__()
        self.is_unmasked = fault == "mask"
        epsilon = 1e-5 if fault == "epsilon" else config.layer_norm_eps
        gelu = "tanh" if fault == "gelu" else "none"
        self.embedded = Embedded(config, epsilon)
        self.blocks = nn.ModuleList(
            Block(config, epsilon, gelu, fault) for _ in range(config.num_hidden_layers)
        )
        self.head = Head(config, epsilon, gelu)
        self.head.decoder.weight = self.embedded.word.weight

    def forward(self, tokens: torch.Tensor, is_word: torch.Tensor) -> torch.Tensor:
        x = self.embedded(tokens)
        lowest = torch.finfo(x.dtype).min
        added = torch.zeros(is_word.shape).masked_fill(~is_word, lowest)[:, None, None, :]
        for block in self.blocks:
            x = block(x, None if self.is_unmasked else added)
        return self.head(x)

    @torch.no_grad()
    def load(self, original: nn.Module) -> "PortedBert":
        """Copies the weights of a transformers model, and returns self in evaluation mode."""
        theirs = original.state_dict()
        for name, ours in self.state_dict().items():
            ours.copy_(theirs[_their_name(name)])
        return self.eval()


def _their_name(name: str) -> str:
    if name.startswith("blocks."):
        _, block, rest = name.split(".", 2)
        return f"bert.encoder.layer.{block}.{_replaced(rest, IN_BLOCK)}"
    return _replaced(name, NAMES)


def _replaced(name: str, names: dict[str, str]) -> str:
    ours = max((each for each in names if name.startswith(each + ".")), key=len)
    return names[ours] + name[len(ours) :]


#: Our paths, and transformers' for them.
NAMES = {
    "embedded": "bert.embeddings", "embedded.word": "bert.embeddings.word_embeddings",
    "embedded.kind": "bert.embeddings.token_type_embeddings",
    "embedded.place": "bert.embeddings.position_embeddings", "embedded.norm": "bert.embeddings.LayerNorm",
    "head": "cls.predictions", "head.dense": "cls.predictions.transform.dense",
    "head.act": "cls.predictions.transform.transform_act_fn",
    "head.norm": "cls.predictions.transform.LayerNorm", "head.decoder": "cls.predictions.decoder",
}  # fmt: skip

#: The same for what lies in `blocks.N`, which is `bert.encoder.layer.N`.
IN_BLOCK = {
    "attn": "attention.self", "attn.q": "attention.self.query", "attn.k": "attention.self.key",
    "attn.v": "attention.self.value", "out": "attention.output.dense", "norm1": "attention.output.LayerNorm",
    "up": "intermediate.dense", "act": "intermediate.intermediate_act_fn", "down": "output.dense",
    "norm2": "output.LayerNorm",
}  # fmt: skip

#: The rules with which a user tells what became of the modules of transformers' BERT.
RULES = [
    *(f"{their.replace('.', chr(92) + '.')}={ours}" for ours, their in NAMES.items()),
    r"bert\.encoder\.layer\.(\d+)=blocks.\1",
    *(
        rf"bert\.encoder\.layer\.(\d+)\.{their.replace('.', chr(92) + '.')}=blocks.\1.{ours}"
        for ours, their in IN_BLOCK.items()
    ),
]
