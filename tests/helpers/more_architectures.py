"""Ten more transformers architectures from tiny configs, with random weights; all but DETR with a loss."""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from helpers.architectures import ARCHITECTURES, TEXT, tokens

Made = tuple[nn.Module, dict[str, Any]]

LLAMA_LIKE = {**TEXT, "intermediate_size": 32, "num_key_value_heads": 1}


def _language_model(name: str, **config: Any) -> Callable[[], Made]:
    def make() -> Made:
        import transformers

        kind = getattr(transformers, name)
        ids = tokens()
        return kind(kind.config_class(**config)), {"input_ids": ids, "labels": ids}

    return make


def _resnet() -> Made:
    from transformers import ResNetConfig, ResNetForImageClassification

    config = ResNetConfig(
        embedding_size=8, hidden_sizes=[8, 16], depths=[1, 2], layer_type="basic", num_labels=3
    )
    return ResNetForImageClassification(config), _image(32)


def _image(size: int) -> dict[str, Any]:
    return {"pixel_values": torch.randn(2, 3, size, size), "labels": torch.tensor([0, 2])}


def _detr() -> Made:
    from transformers import DetrConfig, DetrForObjectDetection, ResNetConfig

    backbone = ResNetConfig(
        embedding_size=8, hidden_sizes=[8, 16], depths=[1, 1], layer_type="basic", out_features=["stage2"]
    )
    config = DetrConfig(
        backbone_config=backbone,
        use_timm_backbone=False,
        use_pretrained_backbone=False,
        backbone=None,
        d_model=16,
        encoder_layers=1,
        decoder_layers=1,
        encoder_attention_heads=2,
        decoder_attention_heads=2,
        encoder_ffn_dim=16,
        decoder_ffn_dim=16,
        num_queries=4,
        num_labels=3,
    )
    return DetrForObjectDetection(config), {"pixel_values": torch.randn(2, 3, 32, 32)}  # its loss needs scipy


def _wav2vec2() -> Made:
    from transformers import Wav2Vec2Config, Wav2Vec2ForCTC

    config = Wav2Vec2Config(
        vocab_size=16,
        hidden_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=32,
        conv_dim=(8, 8),
        conv_stride=(5, 2),
        conv_kernel=(10, 3),
        num_conv_pos_embeddings=4,
        num_conv_pos_embedding_groups=2,
        num_feat_extract_layers=2,
        mask_time_length=2,
        ctc_zero_infinity=True,
    )
    return Wav2Vec2ForCTC(config), {
        "input_values": torch.randn(2, 400),
        "labels": torch.randint(1, 16, (2, 5)),
    }


MORE: dict[str, Callable[[], Made]] = {
    "Qwen3-MoE": _language_model(
        "Qwen3MoeForCausalLM",
        **LLAMA_LIKE,
        head_dim=8,
        num_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=16,
        output_router_logits=True,
    ),
    "Gemma 3": _language_model("Gemma3ForCausalLM", **LLAMA_LIKE, head_dim=8, sliding_window=4),
    "DeepSeek-V3": _language_model(
        "DeepseekV3ForCausalLM",
        **{**LLAMA_LIKE, "num_key_value_heads": 2},
        moe_intermediate_size=16,
        n_routed_experts=4,
        num_experts_per_tok=2,
        n_group=2,
        topk_group=1,
        q_lora_rank=8,
        kv_lora_rank=8,
        qk_rope_head_dim=4,
        qk_nope_head_dim=4,
        v_head_dim=8,
        first_k_dense_replace=1,
    ),
    "ResNet": _resnet,
    "Mamba-2": _language_model(
        "Mamba2ForCausalLM",
        vocab_size=32,
        hidden_size=16,
        num_hidden_layers=2,
        state_size=4,
        num_heads=4,
        head_dim=8,
        n_groups=1,
        chunk_size=4,
    ),
    "DETR": _detr,
    "Wav2Vec2": _wav2vec2,
    "RWKV": _language_model(
        "RwkvForCausalLM",
        vocab_size=32,
        hidden_size=16,
        num_hidden_layers=2,
        attention_hidden_size=16,
        intermediate_size=32,
        context_length=16,
    ),
    "xLSTM": _language_model(
        "xLSTMForCausalLM",
        vocab_size=32,
        hidden_size=16,
        num_hidden_layers=2,
        num_heads=2,
        chunk_size=4,
        use_cache=False,
        mode="train",
    ),
    "OPT": _language_model("OPTForCausalLM", **TEXT, ffn_dim=32, word_embed_proj_dim=16),
}

#: All twenty.
TWENTY: dict[str, Callable[[], Made]] = {**ARCHITECTURES, **MORE}
