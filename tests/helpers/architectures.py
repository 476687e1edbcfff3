"""Ten transformers architectures from tiny configs, with random weights, keyword arguments and a loss."""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

TEXT = {"vocab_size": 32, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}


def tokens(length: int = 8) -> torch.Tensor:
    return torch.randint(3, 32, (2, length))


def _gpt2() -> tuple[nn.Module, dict[str, Any]]:
    from transformers import GPT2Config, GPT2LMHeadModel

    model = GPT2LMHeadModel(GPT2Config(vocab_size=32, n_embd=16, n_layer=2, n_head=2, n_positions=16))
    ids = tokens()
    return model, {"input_ids": ids, "labels": ids}


def _llama():
    from transformers import LlamaConfig, LlamaForCausalLM

    model = LlamaForCausalLM(LlamaConfig(**TEXT, intermediate_size=32, num_key_value_heads=1))
    ids = tokens()
    return model, {"input_ids": ids, "labels": ids}


def _mixtral():
    from transformers import MixtralConfig, MixtralForCausalLM

    config = MixtralConfig(
        **TEXT,
        intermediate_size=32,
        num_key_value_heads=1,
        num_local_experts=3,
        num_experts_per_tok=2,
        output_router_logits=True,
    )
    ids = tokens()
    return MixtralForCausalLM(config), {"input_ids": ids, "labels": ids}


def _bert():
    from transformers import BertConfig, BertForMaskedLM

    ids = tokens()
    return BertForMaskedLM(BertConfig(**TEXT, intermediate_size=32)), {"input_ids": ids, "labels": ids}


def _t5():
    from transformers import T5Config, T5ForConditionalGeneration

    config = T5Config(
        vocab_size=32, d_model=16, d_kv=8, d_ff=32, num_layers=2, num_heads=2, decoder_start_token_id=0
    )
    ids = tokens()
    return T5ForConditionalGeneration(config), {"input_ids": ids, "labels": ids}


def _vit():
    from transformers import ViTConfig, ViTForImageClassification

    config = ViTConfig(
        hidden_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=32,
        image_size=16,
        patch_size=8,
        num_labels=3,
    )
    inputs = {"pixel_values": torch.randn(2, 3, 16, 16), "labels": torch.tensor([0, 2])}
    return ViTForImageClassification(config), inputs


def _whisper():
    from transformers import WhisperConfig, WhisperForConditionalGeneration

    config = WhisperConfig(
        vocab_size=32,
        d_model=16,
        encoder_layers=2,
        decoder_layers=2,
        encoder_attention_heads=2,
        decoder_attention_heads=2,
        encoder_ffn_dim=32,
        decoder_ffn_dim=32,
        num_mel_bins=4,
        max_source_positions=8,
        max_target_positions=16,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
        decoder_start_token_id=1,
    )
    return WhisperForConditionalGeneration(config), {
        "input_features": torch.randn(2, 4, 16),
        "labels": tokens(),
    }


def _mamba():
    from transformers import MambaConfig, MambaForCausalLM

    config = MambaConfig(vocab_size=32, hidden_size=16, num_hidden_layers=2, state_size=4)
    ids = tokens()
    return MambaForCausalLM(config), {"input_ids": ids, "labels": ids}


def _swin():
    from transformers import SwinConfig, SwinForImageClassification

    config = SwinConfig(
        image_size=32, patch_size=4, embed_dim=8, depths=[2, 1], num_heads=[1, 2], window_size=4, num_labels=3
    )
    inputs = {"pixel_values": torch.randn(2, 3, 32, 32), "labels": torch.tensor([0, 2])}
    return SwinForImageClassification(config), inputs


def _clip():
    from transformers import CLIPConfig, CLIPModel

    part = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    config = CLIPConfig(
        text_config={**part, "vocab_size": 32, "max_position_embeddings": 16, "eos_token_id": 2},
        vision_config={**part, "image_size": 16, "patch_size": 8},
        projection_dim=8,
    )
    inputs = {"input_ids": tokens(), "pixel_values": torch.randn(2, 3, 16, 16), "return_loss": True}
    return CLIPModel(config), inputs


ARCHITECTURES: dict[str, Callable[[], tuple[nn.Module, dict[str, Any]]]] = {
    "GPT-2": _gpt2,
    "Llama": _llama,
    "Mixtral": _mixtral,
    "BERT": _bert,
    "T5": _t5,
    "ViT": _vit,
    "Whisper": _whisper,
    "Mamba": _mamba,
    "Swin": _swin,
    "CLIP": _clip,
}
