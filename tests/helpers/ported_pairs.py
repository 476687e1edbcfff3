"""Ports of transformers' models, each with the faults that ports have, and the place that an answer must name."""

from collections.abc import Callable, Mapping
from functools import cache, partial
from typing import Any, NamedTuple

import torch
from torch import nn

from .pairs import OTHER_OPS, Pair, Run, Truth, seeded, train
from .ports import gemma, gpt2

WIDTH, VOCABULARY = 48, 40
TEXT = {
    "vocab_size": VOCABULARY, "hidden_size": WIDTH, "num_hidden_layers": 2, "num_attention_heads": 4,
    "intermediate_size": 64, "max_position_embeddings": 2048,
}  # fmt: skip


@cache
def words() -> torch.Tensor:
    return torch.randint(3, VOCABULARY, (2, 7), generator=torch.Generator().manual_seed(1))


def make_gpt2() -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(
        vocab_size=VOCABULARY, n_embd=WIDTH, n_layer=2, n_head=4, n_positions=16, initializer_range=0.2,
        bos_token_id=0, eos_token_id=0,
    )  # fmt: skip
    return GPT2LMHeadModel(config).eval()


def make_gemma() -> nn.Module:
    from transformers import GemmaConfig, GemmaForCausalLM

    config = GemmaConfig(
        **TEXT, num_key_value_heads=2, head_dim=12, initializer_range=0.2, attn_implementation="eager",
        use_cache=False,
    )  # fmt: skip
    return GemmaForCausalLM(config).eval()


def make_bert() -> nn.Module:
    from transformers import BertConfig, BertForMaskedLM

    return BertForMaskedLM(BertConfig(**TEXT, attn_implementation="eager")).eval()


@cache
def places() -> torch.Tensor:
    """Positions that bfloat16 rounds."""
    return torch.arange(1001, 1008)[None]


@cache
def is_word() -> torch.Tensor:
    """True but for the padding."""
    given = torch.ones(2, 7, dtype=torch.bool)
    given[0, 5:] = False
    return given


class Kind(NamedTuple):
    make: Callable[[], nn.Module]
    port: type
    call: Callable[[Any], torch.Tensor]
    call_port: Callable[[Any], torch.Tensor]
    rules: list[str]
    faults: Mapping[str, Truth]


KINDS = {
    "GPT-2": Kind(
        make_gpt2,
        gpt2.PortedGPT2,
        lambda model: model(input_ids=words(), use_cache=False).logits,
        lambda model: model(words()),
        gpt2.RULES,
        {
            "gelu": Truth("transformer.h.0.mlp.act"),
            "mask": Truth(
                "transformer.h.0.attn", ops=("aten._scaled_dot_product_flash_attention_for_cpu.default",)
            ),
            "dropout": Truth("transformer.h.1.attn.resid_dropout"),
            "transposed": Truth("transformer.h.1.attn.c_proj", ops=("aten.addmm.default", None)),
            "untied": Truth("transformer.wte", "optimizer"),
        },
    ),
    "Gemma": Kind(
        make_gemma,
        gemma.PortedGemma,
        lambda model: model(input_ids=words(), position_ids=places()).logits,
        lambda model: model(words(), places()),
        gemma.RULES,
        {
            "embed scale": Truth("model.embed_tokens", ops=("aten.mul.Tensor",)),
            "norm": Truth(
                "model.layers.0.input_layernorm", ops=("aten.add.Tensor", "aten.mul.Tensor")
            ),
            "positions": Truth("model.rotary_emb", ops=("aten.mul.Tensor",)),
            "gelu": Truth("model.layers.0.mlp.act_fn", ops=("aten.gelu.default",)),
        },
    ),
}  # fmt: skip


def original(name: str) -> Run:
    kind = KINDS[name]
    return train(seeded(kind.make), kind.call, labels=words())


def port(name: str, fault: str | None) -> Run:
    kind = KINDS[name]
    model = seeded(kind.make)
    return train(kind.port(model.config, fault).load(model), kind.call_port, labels=words())


def pair_of(name: str, fault: str) -> Pair:
    """The original, and the port with or without a fault."""
    kind = KINDS[name]
    return Pair(
        partial(original, name),
        lambda is_planted: port(name, fault if is_planted else None),
        kind.faults[fault],
        {"map": kind.rules, **OTHER_OPS},
    )
