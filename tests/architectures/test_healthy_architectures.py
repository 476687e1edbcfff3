"""Architectures of transformers make no false alarm about NaN and infinite values, with padding on the left."""

import inspect
from typing import Any

import pytest
import torch
from torch import nn

import modtrace
from helpers.architectures import TEXT
from helpers.nonfinite_models import record_training

transformers = pytest.importorskip("transformers")

BERT_LIKE = {**TEXT, "intermediate_size": 32}
LLAMA_LIKE = {**BERT_LIKE, "num_key_value_heads": 1}
EXPERTS = {**LLAMA_LIKE, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
GPT_LIKE = {"vocab_size": 32, "n_embd": 16, "n_layer": 2, "n_head": 2}
MAMBA_LIKE = {"vocab_size": 32, "hidden_size": 16, "num_hidden_layers": 2, "state_size": 4}
T5_LIKE = {
    "vocab_size": 32, "d_model": 16, "d_kv": 8, "d_ff": 32, "num_layers": 2, "num_heads": 2,
    "decoder_start_token_id": 0,
}  # fmt: skip
BART_LIKE = {
    "vocab_size": 32, "d_model": 16, "encoder_layers": 1, "decoder_layers": 1, "encoder_attention_heads": 2,
    "decoder_attention_heads": 2, "encoder_ffn_dim": 32, "decoder_ffn_dim": 32, "pad_token_id": 0, "bos_token_id": 0,
    "eos_token_id": 1, "decoder_start_token_id": 0,
}  # fmt: skip

HEALTHY: dict[str, dict[str, Any]] = {
    "AlbertForMaskedLM": {**BERT_LIKE, "embedding_size": 16},
    "BartForConditionalGeneration": BART_LIKE,
    "BertForMaskedLM": BERT_LIKE,
    "BigBirdForMaskedLM": BERT_LIKE,
    "BlenderbotForConditionalGeneration": BART_LIKE,
    "BloomForCausalLM": {"vocab_size": 32, "hidden_size": 16, "n_layer": 2, "n_head": 2},
    "CodeGenForCausalLM": {**GPT_LIKE, "n_head": 4, "rotary_dim": 4},
    "CohereForCausalLM": LLAMA_LIKE,
    "ConvBertForMaskedLM": {**BERT_LIKE, "embedding_size": 16, "head_ratio": 1},
    "DebertaForMaskedLM": BERT_LIKE,
    "DebertaV2ForMaskedLM": BERT_LIKE,
    "DistilBertForMaskedLM": {"vocab_size": 32, "dim": 16, "n_layers": 2, "n_heads": 2, "hidden_dim": 32},
    "ElectraForMaskedLM": {**BERT_LIKE, "embedding_size": 16},
    "FNetForMaskedLM": BERT_LIKE,
    "FalconForCausalLM": TEXT,
    "FalconMambaForCausalLM": MAMBA_LIKE,
    "GPT2LMHeadModel": GPT_LIKE,
    "GPTJForCausalLM": {**GPT_LIKE, "rotary_dim": 4},
    "GPTNeoXForCausalLM": BERT_LIKE,
    "GemmaForCausalLM": {**LLAMA_LIKE, "head_dim": 8},
    "Gemma2ForCausalLM": {**LLAMA_LIKE, "head_dim": 8},
    "Gemma3ForCausalLM": {**LLAMA_LIKE, "head_dim": 8},
    "GraniteForCausalLM": LLAMA_LIKE,
    "LlamaForCausalLM": LLAMA_LIKE,
    "LongformerForMaskedLM": {**BERT_LIKE, "attention_window": [4, 4]},
    "MPNetForMaskedLM": BERT_LIKE,
    "MT5ForConditionalGeneration": T5_LIKE,
    "MambaForCausalLM": MAMBA_LIKE,
    "Mamba2ForCausalLM": {**MAMBA_LIKE, "num_heads": 4, "head_dim": 8, "n_groups": 1, "chunk_size": 4},
    "MistralForCausalLM": LLAMA_LIKE,
    "MixtralForCausalLM": {**LLAMA_LIKE, "num_local_experts": 4},
    "MobileBertForMaskedLM": {**BERT_LIKE, "embedding_size": 16, "intra_bottleneck_size": 16},
    "MptForCausalLM": {"vocab_size": 32, "d_model": 16, "n_layers": 2, "n_heads": 2},
    "NystromformerForMaskedLM": BERT_LIKE,
    "OPTForCausalLM": {**TEXT, "ffn_dim": 32, "word_embed_proj_dim": 16},
    "OlmoForCausalLM": LLAMA_LIKE,
    "OlmoeForCausalLM": {**LLAMA_LIKE, "num_experts": 4, "num_experts_per_tok": 2},
    "PegasusForConditionalGeneration": BART_LIKE,
    "PhiForCausalLM": BERT_LIKE,
    "Qwen2ForCausalLM": LLAMA_LIKE,
    "Qwen2MoeForCausalLM": {**EXPERTS, "shared_expert_intermediate_size": 16},
    "Qwen3ForCausalLM": {**LLAMA_LIKE, "head_dim": 8},
    "Qwen3MoeForCausalLM": {**EXPERTS, "head_dim": 8},
    "RecurrentGemmaForCausalLM": {**LLAMA_LIKE, "lru_width": 16, "block_types": ["recurrent", "attention"]},
    "RobertaForMaskedLM": BERT_LIKE,
    "RwkvForCausalLM": {k: v for k, v in MAMBA_LIKE.items() if k != "state_size"},
    "SqueezeBertForMaskedLM": {**BERT_LIKE, "embedding_size": 16},
    "StableLmForCausalLM": LLAMA_LIKE,
    "SwitchTransformersForConditionalGeneration": {**T5_LIKE, "num_experts": 4},
    "T5ForConditionalGeneration": T5_LIKE,
    "XGLMForCausalLM": {
        "vocab_size": 32, "d_model": 16, "num_layers": 2, "attention_heads": 2, "ffn_dim": 32,
    },
    "XLNetLMHeadModel": {"vocab_size": 32, "d_model": 16, "n_layer": 2, "n_head": 2, "d_inner": 32},
    "YosoForMaskedLM": BERT_LIKE,
}  # fmt: skip


@pytest.mark.zoo
@pytest.mark.parametrize("attention", ["eager", "sdpa"])
@pytest.mark.parametrize("name", HEALTHY)
def test_every_architecture_trains_without_a_false_alarm(name: str, attention: str) -> None:
    assert record(name, HEALTHY[name], attention).first_nonfinite() is None


@pytest.mark.parametrize("name", ["GPT2LMHeadModel", "MixtralForCausalLM", "MambaForCausalLM"])
def test_a_sample_of_the_architectures_trains_without_a_false_alarm(name: str) -> None:
    assert record(name, HEALTHY[name], "eager").first_nonfinite() is None


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_checkpointed_gpt_trains_without_a_false_alarm(use_reentrant: bool) -> None:
    rec = record("GPT2LMHeadModel", GPT_LIKE, "eager", use_reentrant=use_reentrant)
    assert rec.first_nonfinite() is None
    assert "recompute" in rec.table("ops")["phase"].to_pylist()


def test_two_masks_of_the_lowest_number_whose_sum_a_softmax_absorbs_are_no_finding() -> None:
    config = {
        "vocab_size": 32, "hidden_size": 16, "num_layers": 2, "num_heads": 2, "window_size": 4,
        "attention_types": [[["global", "local"], 1]],
    }  # fmt: skip
    rec = record("GPTNeoForCausalLM", config, "eager")
    assert rec.first_nonfinite() is None
    assert (rec.table("values")["inf_count"].to_numpy() > 0).any()


def record(
    name: str, config: dict[str, Any], attention: str, use_reentrant: bool | None = None
) -> modtrace.Recording:
    """Returns the recording of two training steps on sequences of which one begins with padding."""
    torch.manual_seed(0)
    kind = getattr(transformers, name)
    model: nn.Module = kind(kind.config_class(**config)).train()
    try:
        model.set_attn_implementation(attention)
    except ValueError:
        pytest.skip(f"{name} has no {attention} attention")
    if use_reentrant is not None:
        model.gradient_checkpointing_enable({"use_reentrant": use_reentrant})
    ids, mask = torch.randint(2, 32, (2, 8)), torch.ones(2, 8, dtype=torch.long)
    mask[0, :3] = 0
    batch = {"input_ids": ids, "labels": ids}
    if "attention_mask" in inspect.signature(model.forward).parameters:
        batch["attention_mask"] = mask
    return record_training(model, lambda step: batch, loss=lambda found: found.loss)
