"""Models and their ports that call layers in another order, with faults, and the modules that an answer may name."""

from collections.abc import Callable, Mapping
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn import functional as F

from .pairs import OTHER_OPS, Pair, Run, Truth, seeded, train
from .ported_pairs import TEXT, is_word, make_bert, words
from .ports import reordered


@cache
def image() -> torch.Tensor:
    return torch.randn(2, 3, 16, 16, generator=torch.Generator().manual_seed(1))


@cache
def large_image() -> torch.Tensor:
    return torch.randn(2, 3, 64, 64, generator=torch.Generator().manual_seed(1))


def make_llama() -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(**TEXT, num_key_value_heads=2, initializer_range=0.2, use_cache=False)
    return LlamaForCausalLM(config).eval()


def make_vit() -> nn.Module:
    from transformers import ViTConfig, ViTForImageClassification

    config = ViTConfig(
        hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4, image_size=16, patch_size=4,
        num_labels=5, initializer_range=0.2,
    )  # fmt: skip
    return ViTForImageClassification(config).eval()


def make_resnet() -> nn.Module:
    from transformers import ResNetConfig, ResNetForImageClassification

    return ResNetForImageClassification(
        ResNetConfig(embedding_size=8, hidden_sizes=[16, 32], depths=[2, 2], num_labels=5)
    )


def make_t5() -> nn.Module:
    from transformers import T5Config, T5ForConditionalGeneration

    config = T5Config(
        d_model=32, d_ff=48, num_layers=2, num_heads=4, d_kv=8, vocab_size=40, decoder_start_token_id=0,
        dropout_rate=0.0, tie_word_embeddings=True,
    )  # fmt: skip
    return T5ForConditionalGeneration(config).eval()


class Planted(NamedTuple):
    plant: Callable[[Any], object]  # changes a port
    paths: tuple[str, ...]  # of the original: where the change is
    says: str = ""  # what the answer has to say besides


class Ported(NamedTuple):
    make: Callable[[], nn.Module]
    port: Callable[[nn.Module], nn.Module]
    call: Callable[[Any], torch.Tensor]
    call_port: Callable[[Any], torch.Tensor]
    labels: Callable[[], torch.Tensor]
    faults: Mapping[str, Planted]


def put(path: str, **values: Any) -> Callable[[nn.Module], None]:
    """Returns a fault: attributes of a module of the port."""

    def plant(port: nn.Module) -> None:
        module = port.get_submodule(path)
        for name, value in values.items():
            setattr(module, name, value)

    return plant


def scale(path: str, **factors: float) -> Callable[[nn.Module], None]:
    """Returns a fault: attributes of a module of the port, times a factor."""
    return lambda port: put(
        path, **{n: getattr(port.get_submodule(path), n) * f for n, f in factors.items()}
    )(port)


def change(path: str, how: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[nn.Module], None]:
    """Returns a fault: another parameter or buffer of the port."""

    def plant(port: nn.Module) -> None:
        module, _, name = path.rpartition(".")
        tensor = getattr(port.get_submodule(module), name)
        with torch.no_grad():
            tensor.copy_(how(tensor.clone()))

    return plant


def exchange(path: str, one: str, other: str) -> Callable[[nn.Module], None]:
    """Returns a fault: the weights of two modules are exchanged, as by a wrong name in a conversion."""

    def plant(port: nn.Module) -> None:
        first, second = (port.get_submodule(f"{path}.{each}") for each in (one, other))
        with torch.no_grad():
            for mine, theirs in zip(first.parameters(), second.parameters(), strict=True):
                kept = mine.clone()
                mine.copy_(theirs)
                theirs.copy_(kept)

    return plant


def tanh_gelu(x: torch.Tensor) -> torch.Tensor:
    return F.gelu(x, approximate="tanh")


LLAMA, BERT, VIT = "model.layers.1", "bert.encoder.layer.1", "vit.layers.1"
RESNET, READS, WRITES = "resnet.encoder.stages.1.layers", "encoder.block.1.layer", "decoder.block.1.layer"

PORTED = {
    "Llama in another order": Ported(
        make_llama,
        lambda model: reordered.load(reordered.Llama(model.config), model, reordered.Llama.NAMES),
        lambda model: model(input_ids=words()).logits,
        lambda port: port(words()),
        words,
        {
            "epsilon": Planted(put("stack.1.before", eps=1e-2), (f"{LLAMA}.input_layernorm",)),
            "epsilon of the last norm": Planted(put("norm", eps=1e-3), ("model.norm",)),
            "scale": Planted(scale("stack.1.mix", factor=2.0), (f"{LLAMA}.self_attn",)),
            "activation": Planted(put("stack.1", act=F.gelu), (f"{LLAMA}.mlp.act_fn", f"{LLAMA}.mlp")),
            "rotary base": Planted(
                put("turn", base=500_000.0), ("model.rotary_emb", "model.layers.0.self_attn")
            ),
            "order of grouped heads": Planted(
                put("stack.1.mix", is_interleaved=False), (f"{LLAMA}.self_attn",)
            ),
            "residual": Planted(put("stack.1", share=0.5), (LLAMA,)),
            "negated row": Planted(
                change("stack.1.up.weight", lambda w: torch.cat([-w[:1], w[1:]])), (f"{LLAMA}.mlp.up_proj",)
            ),
            "keys for values": Planted(
                exchange("stack.1.mix", "k", "v"),
                (f"{LLAMA}.self_attn", f"{LLAMA}.self_attn.k_proj", f"{LLAMA}.self_attn.v_proj"),
            ),
            "shifted words": Planted(change("words.weight", lambda w: w.roll(1, 0)), ("model.embed_tokens",)),
        },
    ),
    "BERT in another order": Ported(
        make_bert,
        lambda model: reordered.load(reordered.Bert(model.config), model, reordered.Bert.NAMES),
        lambda model: model(input_ids=words(), attention_mask=is_word().long()).logits,
        lambda port: port(words(), is_word()),
        words,
        {
            "epsilon": Planted(put("stack.1.last", eps=1e-2), (f"{BERT}.output.LayerNorm",)),
            "epsilon of the first norm": Planted(put("norm", eps=1e-2), ("bert.embeddings.LayerNorm",)),
            "scale": Planted(scale("stack.1.mix", factor=2.0), (f"{BERT}.attention.self",)),
            "activation": Planted(
                put("stack.1", act=tanh_gelu),
                (f"{BERT}.intermediate.intermediate_act_fn", f"{BERT}.intermediate"),
            ),
            "activation of the head": Planted(
                put("", act=tanh_gelu),
                ("cls.predictions.transform.transform_act_fn", "cls.predictions.transform"),
            ),
            "positions": Planted(
                put("", first=1), ("bert.embeddings", "bert.embeddings.position_embeddings", "")
            ),
            "mask": Planted(put("", lowest=0.0), ("bert", "bert.encoder.layer.0.attention.self")),
            "residual": Planted(put("stack.1", share=0.5), (BERT, f"{BERT}.attention.output")),
            "negated bias": Planted(change("stack.1.up.bias", torch.neg), (f"{BERT}.intermediate.dense",)),
            "queries for keys": Planted(
                exchange("stack.1.mix", "q", "k"),
                (f"{BERT}.attention.self", f"{BERT}.attention.self.query", f"{BERT}.attention.self.key"),
            ),
        },
    ),
    "ViT in another order": Ported(
        make_vit,
        lambda model: reordered.load(reordered.ViT(model.config), model, reordered.ViT.NAMES),
        lambda model: model(pixel_values=image()).logits[:, None],
        lambda port: port(image())[:, None],
        lambda: torch.tensor([[1], [3]]),
        {
            "epsilon": Planted(put("stack.1.before", eps=1e-2), (f"{VIT}.layernorm_before",)),
            "epsilon of the last norm": Planted(put("norm", eps=1e-2), ("vit.layernorm",)),
            "scale": Planted(scale("stack.1.mix", factor=2.0), (f"{VIT}.attention",)),
            "activation": Planted(put("stack.1", act=tanh_gelu), (f"{VIT}.mlp.activation_fn", f"{VIT}.mlp")),
            "token that is read": Planted(
                put("", pick=1), ("", "classifier"), "select with index 0 against 1"
            ),
            "positions": Planted(put("", share=0.5), ("vit.embeddings",)),
            "order of positions": Planted(
                change("position_embeddings", lambda p: p.flip(1)), ("vit.embeddings",)
            ),
            "residual": Planted(put("stack.1", share=0.5), (VIT,)),
            "turned patches": Planted(
                change("cut.weight", lambda w: w.mT), ("vit.embeddings.patch_embeddings.projection",)
            ),
            "missing bias": Planted(change("stack.1.down.bias", torch.zeros_like), (f"{VIT}.mlp.fc2",)),
        },
    ),
    "ResNet in another order": Ported(
        make_resnet,
        lambda model: reordered.load(reordered.ResNet(model.config), model, reordered.ResNet.NAMES),
        lambda model: model(pixel_values=large_image()).logits[:, None],
        lambda port: port(large_image())[:, None],
        lambda: torch.tensor([[1], [3]]),
        {
            "epsilon": Planted(put("stages.1.0.two.norm", eps=1e-2), (f"{RESNET}.0.layer.1.normalization",)),
            "momentum": Planted(
                put("stages.1.0.one.norm", momentum=0.01), (f"{RESNET}.0.layer.0.normalization",)
            ),
            "norm in evaluation mode": Planted(
                lambda port: port.stages[1][0].short.norm.eval(), (f"{RESNET}.0.shortcut.normalization",)
            ),
            "activation": Planted(put("stages.1.1", act=F.leaky_relu), (f"{RESNET}.1.activation",)),
            "activation of a layer": Planted(
                put("stages.1.1.one", act=F.silu), (f"{RESNET}.1.layer.0.activation",)
            ),
            "pooling": Planted(put("", pool=F.avg_pool2d), ("resnet.embedder.pooler", "resnet.embedder")),
            "padding": Planted(
                lambda port: setattr(port.stem.conv, "padding_mode", "circular"),
                ("resnet.embedder.embedder.convolution",),
            ),
            "residual": Planted(put("stages.1.1", share=0.5), (f"{RESNET}.1",)),
            "turned kernel": Planted(
                change("stages.1.1.two.conv.weight", lambda w: w.mT), (f"{RESNET}.1.layer.1.convolution",)
            ),
            "norm that starts at zero": Planted(
                change("stages.1.1.three.norm.weight", torch.zeros_like),
                (f"{RESNET}.1.layer.2.normalization",),
            ),
        },
    ),
    "T5 in another order": Ported(
        make_t5,
        lambda model: reordered.load(reordered.T5(model.config), model, reordered.T5.NAMES),
        lambda model: model(input_ids=words(), decoder_input_ids=words()[:, :5]).logits,
        lambda port: port(words(), words()[:, :5]),
        lambda: words()[:, 2:],
        {
            "epsilon": Planted(put("reads.stack.1.norms.0", eps=1e-1), (f"{READS}.0.layer_norm",)),
            "epsilon of the decoder": Planted(put("writes.norm", eps=1e-1), ("decoder.final_layer_norm",)),
            "scale": Planted(put("reads.stack.1.mix", factor=8**-0.5), (f"{READS}.0.SelfAttention",)),
            "scale of the look": Planted(
                put("writes.stack.1.look", factor=8**-0.5), (f"{WRITES}.1.EncDecAttention",)
            ),
            "activation": Planted(
                put("writes.stack.1", act=F.gelu),
                (f"{WRITES}.2.DenseReluDense.act", f"{WRITES}.2.DenseReluDense"),
            ),
            "distances": Planted(
                put("reads", shift=1),
                (
                    "encoder",
                    "reads",
                    "encoder.block.0.layer.0.SelfAttention",
                    "encoder.block.0.layer.0.SelfAttention.relative_attention_bias",
                ),
            ),
            "future": Planted(
                put("writes", is_decoder=False),
                (
                    "decoder.block.0.layer.0.SelfAttention",
                    "decoder.block.0.layer.0.SelfAttention.relative_attention_bias",
                    "decoder",
                ),
            ),
            "scale of the head": Planted(put("", factor=1.0), ("",)),
            "residual": Planted(put("writes.stack.1", share=0.5), (f"{WRITES}.0", "decoder.block.1")),
            "keys for values": Planted(
                exchange("writes.stack.1.look", "k", "v"),
                (
                    f"{WRITES}.1.EncDecAttention",
                    f"{WRITES}.1.EncDecAttention.k",
                    f"{WRITES}.1.EncDecAttention.v",
                ),
            ),
        },
    ),
    "U-Net in another order": Ported(
        reordered.UNet,
        lambda model: reordered.load(reordered.PortedUNet(), model, reordered.PortedUNet.NAMES),
        lambda model: model(image(), torch.ones(2, 8)).flatten(2).mT,
        lambda port: port(image(), torch.ones(2, 8)).flatten(2).mT,
        lambda: torch.arange(512).reshape(2, 256) % 5,
        {
            "epsilon": Planted(put("b.n1", eps=1e-1), ("down2.norm1",)),
            "groups": Planted(put("c.n2", num_groups=2), ("middle.norm2",)),
            "activation": Planted(put("c", act=F.gelu), ("middle",)),
            "order of the skip": Planted(put("", swaps=True), ("",)),
            "interpolation": Planted(put("", mode="bilinear"), ("",)),
            "residual": Planted(put("d", share=0.5), ("up2",)),
            "turned kernel": Planted(change("e.c1.weight", lambda w: w.mT), ("up1.conv1",)),
            "missing bias": Planted(change("d.side.bias", torch.zeros_like), ("up2.skip",)),
            "padding": Planted(lambda port: setattr(port.b.c1, "padding_mode", "reflect"), ("down2.conv1",)),
            "scaled time": Planted(change("clock2.weight", lambda w: 2 * w), ("time.2",)),
        },
    ),
}


def pair_of(name: str, fault: str) -> Pair:
    """The original, and the port with or without a fault; nothing tells which modules are the same."""
    ported, planted = PORTED[name], PORTED[name].faults[fault]

    def port(is_planted: bool) -> Run:
        model = ported.port(_make(name))
        if is_planted:
            planted.plant(model)
        return train(model, ported.call_port, labels=ported.labels())

    return Pair(
        lambda: train(_make(name), ported.call, labels=ported.labels()),
        port,
        Truth(planted.paths[0], also=planted.paths[1:], says=planted.says),
        {"map": "auto", **OTHER_OPS},
    )


def _make(name: str) -> nn.Module:
    """Returns an original whose biases are not zero, as those of a model that was trained."""
    model = seeded(PORTED[name].make)
    with torch.no_grad():
        for each, parameter in model.named_parameters():
            if each.endswith("bias") and parameter.dim() == 1:
                parameter.normal_(std=0.1)
    return model
