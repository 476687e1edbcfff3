"""Ports written anew: other names, fused or written-out steps, and layers called in another order than the original's.

A fault is planted by changing an attribute of one of their modules.
"""

import re
from collections.abc import Callable, Mapping
from typing import ClassVar

import torch
from torch import nn
from torch.nn import functional as F


def load(port: nn.Module, original: nn.Module, names: Mapping[str, str]) -> nn.Module:
    """Copies the weights of an original into its port, and returns the port in the same mode.

    Args:
        port: the port.
        original: the original.
        names: expressions for the modules of the port that have weights, and the modules of the original that they are.
    """
    theirs = original.state_dict()
    with torch.no_grad():
        for name, ours in port.state_dict().items():
            path, _, last = name.rpartition(".")
            found = [
                re.sub(ours_path, path_b, path)
                for ours_path, path_b in names.items()
                if re.fullmatch(ours_path, path)
            ]
            ours.copy_(theirs[f"{found[0]}.{last}"])
    return port.train(original.training)


class RMS(nn.Module):
    """A norm by the root mean square."""

    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.ones(width)), eps

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.weight * (x / (x * x).mean(-1, keepdim=True).add(self.eps).sqrt())


class Mix(nn.Module):
    """Attention that projects values, keys and queries in this order."""

    def __init__(
        self, width: int, heads: int, groups: int | None = None, *, size: int | None = None, bias: bool = True
    ) -> None:
        super().__init__()
        self.heads, self.groups, size = heads, groups or heads, size or width // heads
        self.v, self.k = (nn.Linear(width, self.groups * size, bias=bias) for _ in range(2))
        self.q, self.o = nn.Linear(width, heads * size, bias=bias), nn.Linear(heads * size, width, bias=bias)
        self.factor, self.is_interleaved = size**-0.5, True

    def spread(self, x: torch.Tensor, heads: int) -> torch.Tensor:
        x = x.unflatten(-1, (heads, -1)).transpose(1, 2)
        if heads == self.heads:
            return x
        times = self.heads // heads
        return x.repeat_interleave(times, 1) if self.is_interleaved else x.repeat(1, times, 1, 1)

    def forward(
        self,
        x: torch.Tensor,
        memory: torch.Tensor | None = None,
        *,
        turn: Callable[[torch.Tensor], torch.Tensor] = lambda x: x,
        added: torch.Tensor | None = None,
    ) -> torch.Tensor:
        memory = x if memory is None else memory
        v = self.spread(self.v(memory), self.groups)
        k = self.spread(self.k(memory), self.groups)
        q = self.spread(self.q(x), self.heads)
        weights = turn(q) @ turn(k).mT * self.factor
        weights = weights if added is None else weights + added
        return self.o((weights.softmax(-1) @ v).transpose(1, 2).flatten(2))


def hide_future(time: int) -> torch.Tensor:
    return torch.full((time, time), -1e30).triu(1)


class Rope(nn.Module):
    """Rotary positions."""

    def __init__(self, size: int, base: float) -> None:
        super().__init__()
        self.size, self.base, self.first = size, base, 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        speed = self.base ** -(torch.arange(0, self.size, 2) / self.size)
        angle = torch.outer(torch.arange(x.shape[2]) + float(self.first), speed).repeat(1, 2)
        left, right = x.chunk(2, -1)
        return x * angle.cos() + torch.cat([-right, left], -1) * angle.sin()


class LlamaBlock(nn.Module):
    def __init__(self, config) -> None:
        super().__init__()
        width, inner = config.hidden_size, config.intermediate_size
        self.before, self.behind = RMS(width, config.rms_norm_eps), RMS(width, config.rms_norm_eps)
        self.mix = Mix(width, config.num_attention_heads, config.num_key_value_heads, bias=False)
        self.up, self.gate, self.down = (
            nn.Linear(width, inner, bias=False),
            nn.Linear(width, inner, bias=False),
            nn.Linear(inner, width, bias=False),
        )
        self.act, self.share = F.silu, 1.0

    def forward(self, x: torch.Tensor, turn: nn.Module) -> torch.Tensor:
        x = self.mix(self.before(x), turn=turn, added=hide_future(x.shape[1])) * self.share + x
        y = self.behind(x)
        up = self.up(y)
        return self.down(up * self.act(self.gate(y))) + x


class Llama(nn.Module):
    """A Llama that calls up before gate, and values before keys before queries."""

    NAMES: ClassVar[dict[str, str]] = {
        r"words": "model.embed_tokens", r"norm": "model.norm", r"head": "lm_head",
        r"stack\.(\d+)\.mix\.([qkvo])": r"model.layers.\1.self_attn.\2_proj",
        r"stack\.(\d+)\.(up|gate|down)": r"model.layers.\1.mlp.\2_proj",
        r"stack\.(\d+)\.before": r"model.layers.\1.input_layernorm",
        r"stack\.(\d+)\.behind": r"model.layers.\1.post_attention_layernorm",
    }  # fmt: skip

    def __init__(self, config) -> None:
        super().__init__()
        self.words = nn.Embedding(config.vocab_size, config.hidden_size)
        self.turn = Rope(config.hidden_size // config.num_attention_heads, 10_000.0)
        self.stack = nn.ModuleList(LlamaBlock(config) for _ in range(config.num_hidden_layers))
        self.norm = RMS(config.hidden_size, config.rms_norm_eps)
        self.head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        x = self.words(words)
        for block in self.stack:
            x = block(x, self.turn)
        return self.head(self.norm(x))


class BertBlock(nn.Module):
    def __init__(self, config) -> None:
        super().__init__()
        width, inner = config.hidden_size, config.intermediate_size
        self.mix = Mix(width, config.num_attention_heads)
        self.norm, self.last = (
            nn.LayerNorm(width, config.layer_norm_eps),
            nn.LayerNorm(width, config.layer_norm_eps),
        )
        self.up, self.down, self.act, self.share = (
            nn.Linear(width, inner),
            nn.Linear(inner, width),
            F.gelu,
            1.0,
        )

    def forward(self, x: torch.Tensor, added: torch.Tensor) -> torch.Tensor:
        x = self.norm(x + self.mix(x, added=added) * self.share)
        return self.last(x + self.down(self.act(self.up(x))))


class Bert(nn.Module):
    """A BERT that looks up positions first, then kinds, then words."""

    NAMES: ClassVar[dict[str, str]] = {
        r"(place)": "bert.embeddings.position_embeddings", r"(kind)": "bert.embeddings.token_type_embeddings",
        r"(words)": "bert.embeddings.word_embeddings", r"norm": "bert.embeddings.LayerNorm",
        r"stack\.(\d+)\.mix\.q": r"bert.encoder.layer.\1.attention.self.query",
        r"stack\.(\d+)\.mix\.k": r"bert.encoder.layer.\1.attention.self.key",
        r"stack\.(\d+)\.mix\.v": r"bert.encoder.layer.\1.attention.self.value",
        r"stack\.(\d+)\.mix\.o": r"bert.encoder.layer.\1.attention.output.dense",
        r"stack\.(\d+)\.norm": r"bert.encoder.layer.\1.attention.output.LayerNorm",
        r"stack\.(\d+)\.up": r"bert.encoder.layer.\1.intermediate.dense",
        r"stack\.(\d+)\.down": r"bert.encoder.layer.\1.output.dense",
        r"stack\.(\d+)\.last": r"bert.encoder.layer.\1.output.LayerNorm",
        r"dense": "cls.predictions.transform.dense", r"final": "cls.predictions.transform.LayerNorm",
        r"head": "cls.predictions.decoder",
    }  # fmt: skip

    def __init__(self, config) -> None:
        super().__init__()
        width = config.hidden_size
        self.place, self.kind = nn.Embedding(config.max_position_embeddings, width), nn.Embedding(2, width)
        self.words, self.norm = (
            nn.Embedding(config.vocab_size, width),
            nn.LayerNorm(width, config.layer_norm_eps),
        )
        self.stack = nn.ModuleList(BertBlock(config) for _ in range(config.num_hidden_layers))
        self.dense, self.final = nn.Linear(width, width), nn.LayerNorm(width, config.layer_norm_eps)
        self.head = nn.Linear(width, config.vocab_size)
        self.head.weight = self.words.weight
        self.first, self.lowest, self.act = 0, -1e30, F.gelu

    def forward(self, words: torch.Tensor, is_word: torch.Tensor) -> torch.Tensor:
        x = self.place(torch.arange(words.shape[1]) + self.first) + self.kind(torch.zeros_like(words))
        x = self.norm(x + self.words(words))
        added = (~is_word)[:, None, None, :] * self.lowest
        for block in self.stack:
            x = block(x, added)
        return self.head(self.final(self.act(self.dense(x))))


class ViTBlock(nn.Module):
    def __init__(self, config) -> None:
        super().__init__()
        width, inner = config.hidden_size, config.intermediate_size
        self.before, self.behind = (nn.LayerNorm(width, config.layer_norm_eps) for _ in range(2))
        self.mix, self.up, self.down = (
            Mix(width, config.num_attention_heads),
            nn.Linear(width, inner),
            nn.Linear(inner, width),
        )
        self.act, self.share = F.gelu, 1.0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.mix(self.before(x)) * self.share
        return x + self.down(self.act(self.up(self.behind(x))))


class ViT(nn.Module):
    """A ViT that projects patches by a linear layer's product, values before keys before queries."""

    NAMES: ClassVar[dict[str, str]] = {
        r"cut": "vit.embeddings.patch_embeddings.projection", r"norm": "vit.layernorm", r"head": "classifier",
        r"stack\.(\d+)\.mix\.([qkvo])": r"vit.layers.\1.attention.\2_proj",
        r"stack\.(\d+)\.up": r"vit.layers.\1.mlp.fc1", r"stack\.(\d+)\.down": r"vit.layers.\1.mlp.fc2",
        r"stack\.(\d+)\.before": r"vit.layers.\1.layernorm_before",
        r"stack\.(\d+)\.behind": r"vit.layers.\1.layernorm_after",
        r"": "vit.embeddings",
    }  # fmt: skip

    def __init__(self, config) -> None:
        super().__init__()
        width, patches = config.hidden_size, (config.image_size // config.patch_size) ** 2
        self.cls_token = nn.Parameter(torch.zeros(1, 1, width))
        self.position_embeddings = nn.Parameter(torch.zeros(1, patches + 1, width))
        self.cut = nn.Conv2d(3, width, config.patch_size, config.patch_size)
        self.stack = nn.ModuleList(ViTBlock(config) for _ in range(config.num_hidden_layers))
        self.norm, self.head = nn.LayerNorm(width, config.layer_norm_eps), nn.Linear(width, config.num_labels)
        self.pick, self.share = 0, 1.0

    def forward(self, image: torch.Tensor) -> torch.Tensor:
        x = self.cut(image).flatten(2).mT
        x = torch.cat([self.cls_token.expand(len(x), -1, -1), x], 1) + self.position_embeddings * self.share
        for block in self.stack:
            x = block(x)
        return self.head(self.norm(x)[:, self.pick])


class Layer(nn.Module):
    """A convolution, a norm, and what follows."""

    def __init__(
        self, inputs: int, outputs: int, size: int, stride: int = 1, act: Callable | None = F.relu
    ) -> None:
        super().__init__()
        self.conv = nn.Conv2d(inputs, outputs, size, stride, size // 2, bias=False)
        self.norm, self.act = nn.BatchNorm2d(outputs), act

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.norm(self.conv(x))
        return x if self.act is None else self.act(x)


class Residual(nn.Module):
    """Calls the short way first."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        is_same = inputs == outputs and stride == 1
        self.short = None if is_same else Layer(inputs, outputs, 1, stride, None)
        self.one, self.two, self.three = (
            Layer(inputs, outputs // 4, 1),
            Layer(outputs // 4, outputs // 4, 3, stride),
            Layer(outputs // 4, outputs, 1, 1, None),
        )
        self.act, self.share = F.relu, 1.0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        short = x if self.short is None else self.short(x)
        return self.act(short + self.three(self.two(self.one(x))) * self.share)


class ResNet(nn.Module):
    NAMES: ClassVar[dict[str, str]] = {
        r"stem\.conv": "resnet.embedder.embedder.convolution", r"stem\.norm": "resnet.embedder.embedder.normalization",
        **{
            rf"stages\.(\d+)\.(\d+)\.{ours}\.{own}": rf"resnet.encoder.stages.\1.layers.\2.{their}.{theirs}"
            for ours, their in {"short": "shortcut", "one": "layer.0", "two": "layer.1", "three": "layer.2"}.items()
            for own, theirs in {"conv": "convolution", "norm": "normalization"}.items()
        },
        r"head": "classifier.1",
    }  # fmt: skip

    def __init__(self, config) -> None:
        super().__init__()
        sizes = [config.embedding_size, *config.hidden_sizes]
        self.stem = Layer(3, sizes[0], 7, 2)
        self.stages = nn.ModuleList(
            nn.ModuleList(
                Residual(inputs if not at else outputs, outputs, 2 if stage and not at else 1)
                for at in range(depth)
            )
            for stage, (inputs, outputs, depth) in enumerate(
                zip(sizes, sizes[1:], config.depths, strict=False)
            )
        )
        self.head, self.pool = nn.Linear(sizes[-1], config.num_labels), F.max_pool2d

    def forward(self, image: torch.Tensor) -> torch.Tensor:
        x = self.pool(self.stem(image), 3, 2, 1)
        for stage in self.stages:
            for block in stage:
                x = block(x)
        return self.head(x.mean((2, 3)))


class T5Block(nn.Module):
    def __init__(self, config, has_memory: bool) -> None:
        super().__init__()
        width, heads, eps = config.d_model, config.num_heads, config.layer_norm_epsilon
        self.norms = nn.ModuleList(RMS(width, eps) for _ in range(3 if has_memory else 2))
        self.mix = Mix(width, heads, size=config.d_kv, bias=False)
        self.look = Mix(width, heads, size=config.d_kv, bias=False) if has_memory else None
        for each in filter(None, (self.mix, self.look)):
            each.factor = 1.0
        self.up, self.down = (
            nn.Linear(width, config.d_ff, bias=False),
            nn.Linear(config.d_ff, width, bias=False),
        )
        self.act, self.share = F.relu, 1.0

    def forward(self, x: torch.Tensor, added: torch.Tensor, memory: torch.Tensor | None) -> torch.Tensor:
        x = x + self.mix(self.norms[0](x), added=added) * self.share
        if self.look is not None:
            x = x + self.look(self.norms[1](x), memory)
        return x + self.down(self.act(self.up(self.norms[-1](x))))


class T5Stack(nn.Module):
    def __init__(self, config, has_memory: bool) -> None:
        super().__init__()
        self.stack = nn.ModuleList(T5Block(config, has_memory) for _ in range(config.num_layers))
        self.near = nn.Embedding(config.relative_attention_num_buckets, config.num_heads)
        self.norm, self.is_decoder = RMS(config.d_model, config.layer_norm_epsilon), has_memory
        self.shift = 0

    def forward(self, x: torch.Tensor, memory: torch.Tensor | None = None) -> torch.Tensor:
        """Short texts: each distance has a bucket of its own."""
        place = torch.arange(x.shape[1])
        apart = place[None, :] - place[:, None]
        bucket = (-apart).clamp(min=0) if self.is_decoder else apart.abs() + 16 * (apart > 0)
        added = self.near((bucket + self.shift).clamp(min=0)).permute(2, 0, 1)[None]
        if self.is_decoder:
            added = added + hide_future(x.shape[1])
        for block in self.stack:
            x = block(x, added, memory)
        return self.norm(x)


class T5(nn.Module):
    NAMES: ClassVar[dict[str, str]] = {
        r"words": "shared", r"head": "lm_head",
        **{
            pattern.replace("SIDE", ours): path.replace("SIDE", theirs)
            for ours, theirs in (("reads", "encoder"), ("writes", "decoder"))
            for pattern, path in {
                r"SIDE\.near": "SIDE.block.0.layer.0.SelfAttention.relative_attention_bias",
                r"SIDE\.norm": "SIDE.final_layer_norm",
                r"SIDE\.stack\.(\d+)\.mix\.([qkvo])": r"SIDE.block.\1.layer.0.SelfAttention.\2",
                r"SIDE\.stack\.(\d+)\.look\.([qkvo])": r"SIDE.block.\1.layer.1.EncDecAttention.\2",
                r"SIDE\.stack\.(\d+)\.norms\.(\d)": r"SIDE.block.\1.layer.\2.layer_norm",
            }.items()
        },
        r"reads\.stack\.(\d+)\.up": r"encoder.block.\1.layer.1.DenseReluDense.wi",
        r"reads\.stack\.(\d+)\.down": r"encoder.block.\1.layer.1.DenseReluDense.wo",
        r"writes\.stack\.(\d+)\.up": r"decoder.block.\1.layer.2.DenseReluDense.wi",
        r"writes\.stack\.(\d+)\.down": r"decoder.block.\1.layer.2.DenseReluDense.wo",
    }  # fmt: skip

    def __init__(self, config) -> None:
        super().__init__()
        self.words = nn.Embedding(config.vocab_size, config.d_model)
        self.reads, self.writes = T5Stack(config, False), T5Stack(config, True)
        self.head = nn.Linear(config.d_model, config.vocab_size, bias=False)
        self.head.weight, self.factor = self.words.weight, config.d_model**-0.5

    def forward(self, words: torch.Tensor, written: torch.Tensor) -> torch.Tensor:
        memory = self.reads(self.words(words))
        return self.head(self.writes(self.words(written), memory) * self.factor)


class UNet(nn.Module):
    """A small U-Net that is told a time."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.time = nn.Sequential(nn.Linear(width, width), nn.SiLU(), nn.Linear(width, width))
        self.enter = nn.Conv2d(3, width, 3, padding=1)
        self.down1, self.down2, self.middle = (
            Step(width, width),
            Step(width, 2 * width),
            Step(2 * width, 2 * width),
        )
        self.up2, self.up1 = Step(4 * width, width), Step(2 * width, width)
        self.leave = nn.Conv2d(width, 5, 1)

    def forward(self, image: torch.Tensor, time: torch.Tensor) -> torch.Tensor:
        told = self.time(time)
        x = self.enter(image)
        one = self.down1(x, told)
        two = self.down2(F.avg_pool2d(one, 2), told)
        x = self.middle(F.avg_pool2d(two, 2), told)
        x = self.up2(torch.cat([F.interpolate(x, scale_factor=2), two], 1), told)
        x = self.up1(torch.cat([F.interpolate(x, scale_factor=2), one], 1), told)
        return self.leave(x)


class Step(nn.Module):
    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.norm1, self.conv1 = nn.GroupNorm(4, inputs), nn.Conv2d(inputs, outputs, 3, padding=1)
        self.norm2, self.conv2 = nn.GroupNorm(4, outputs), nn.Conv2d(outputs, outputs, 3, padding=1)
        self.told, self.skip = nn.Linear(8, outputs), nn.Conv2d(inputs, outputs, 1)

    def forward(self, x: torch.Tensor, told: torch.Tensor) -> torch.Tensor:
        y = self.conv1(F.silu(self.norm1(x))) + self.told(told)[:, :, None, None]
        return self.conv2(F.silu(self.norm2(y))) + self.skip(x)


class Unit(nn.Module):
    """A step of the ported U-Net: it calls the skip first, and the time before the first convolution."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.side, self.when = nn.Conv2d(inputs, outputs, 1), nn.Linear(8, outputs)
        self.n1, self.c1 = nn.GroupNorm(4, inputs), nn.Conv2d(inputs, outputs, 3, padding=1)
        self.n2, self.c2 = nn.GroupNorm(4, outputs), nn.Conv2d(outputs, outputs, 3, padding=1)
        self.act, self.share = lambda x: x * x.sigmoid(), 1.0

    def forward(self, x: torch.Tensor, when: torch.Tensor) -> torch.Tensor:
        side, when = self.side(x), self.when(when)
        y = when[..., None, None] + self.c1(self.act(self.n1(x)))
        return side + self.c2(self.act(self.n2(y))) * self.share


class PortedUNet(nn.Module):
    NAMES: ClassVar[dict[str, str]] = {
        r"clock1": "time.0", r"clock2": "time.2", r"into": "enter", r"out": "leave",
        **{
            rf"{ours}\.{own}": f"{theirs}.{their}"
            for ours, theirs in {"a": "down1", "b": "down2", "c": "middle", "d": "up2", "e": "up1"}.items()
            for own, their in {
                "side": "skip", "when": "told", "n1": "norm1", "c1": "conv1", "n2": "norm2", "c2": "conv2",
            }.items()
        },
    }  # fmt: skip

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.into, self.out = nn.Conv2d(3, width, 3, padding=1), nn.Conv2d(width, 5, 1)
        self.clock1, self.clock2 = nn.Linear(width, width), nn.Linear(width, width)
        self.a, self.b, self.c = Unit(width, width), Unit(width, 2 * width), Unit(2 * width, 2 * width)
        self.d, self.e = Unit(4 * width, width), Unit(2 * width, width)
        self.swaps, self.mode = False, "nearest"

    def forward(self, image: torch.Tensor, time: torch.Tensor) -> torch.Tensor:
        x = self.into(image)
        when = self.clock2(F.silu(self.clock1(time)))
        one = self.a(x, when)
        two = self.b(F.avg_pool2d(one, 2), when)
        x = F.interpolate(self.c(F.avg_pool2d(two, 2), when), scale_factor=2, mode=self.mode)
        x = self.d(torch.cat([two, x] if self.swaps else [x, two], 1), when)
        return self.out(self.e(torch.cat([F.interpolate(x, scale_factor=2), one], 1), when))
