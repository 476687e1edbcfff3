"""Tiny transformers architectures in which values hide what an op reads, and one that is not deterministic."""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from helpers.architectures import TEXT, tokens

Made = tuple[nn.Module, dict[str, Any]]

_SPEECH = {
    "vocab_size": 16,
    "hidden_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "intermediate_size": 32,
    "conv_dim": (8, 8),
    "conv_stride": (5, 2),
    "conv_kernel": (10, 3),
    "num_conv_pos_embeddings": 4,
    "num_conv_pos_embedding_groups": 2,
    "num_feat_extract_layers": 2,
    "mask_time_length": 2,
    "ctc_zero_infinity": True,
}


def _longformer() -> Made:
    """No token has global attention, so a mask of its `index_put_` is false everywhere."""
    from transformers import LongformerConfig, LongformerForMaskedLM

    config = LongformerConfig(
        **{**TEXT, "num_hidden_layers": 1},
        intermediate_size=32,
        attention_window=4,
        max_position_embeddings=32,
        pad_token_id=1,
    )
    ids = tokens()
    return LongformerForMaskedLM(config), {"input_ids": ids, "labels": ids}


def _encodec() -> Made:
    """Compares the length of its input with the padding of a convolution: two integers far from each other."""
    from transformers import EncodecConfig, EncodecModel

    config = EncodecConfig(
        num_filters=4,
        hidden_size=8,
        codebook_dim=8,
        codebook_size=16,
        upsampling_ratios=[4, 2],
        num_lstm_layers=1,
        target_bandwidths=[24.0],
        sampling_rate=8000,
    )
    return EncodecModel(config), {"input_values": torch.randn(2, 1, 64)}


def _gemma_3n() -> Made:
    """Compares token numbers with those of a vocabulary for images and sound, which lie beyond all of them."""
    from transformers import Gemma3nForCausalLM, Gemma3nTextConfig

    config = Gemma3nTextConfig(
        **TEXT,
        vocab_size_per_layer_input=32,
        hidden_size_per_layer_input=8,
        intermediate_size=32,
        num_key_value_heads=1,
        head_dim=8,
        laurel_rank=4,
        num_kv_shared_layers=0,
        activation_sparsity_pattern=[0.5, 0.0],
        sliding_window=4,
        layer_types=["sliding_attention", "full_attention"],
        pad_token_id=0,
    )
    ids = tokens()
    return Gemma3nForCausalLM(config), {"input_ids": ids, "labels": ids}


def _sew_d() -> Made:
    """Compares distances in a short sequence with the 128 from which on they are counted in powers."""
    from transformers import SEWDConfig, SEWDForCTC

    config = SEWDConfig(**_SPEECH, squeeze_factor=2, max_position_embeddings=32)
    return SEWDForCTC(config), {
        "input_values": torch.randn(2, 400),
        "labels": torch.randint(1, 16, (2, 5)),
    }


def _speech_2_text() -> Made:
    """Multiplies the numbers of positions by a mask that is zero everywhere."""
    from transformers import Speech2TextConfig, Speech2TextForConditionalGeneration

    config = Speech2TextConfig(
        vocab_size=32,
        d_model=16,
        encoder_layers=1,
        decoder_layers=1,
        encoder_attention_heads=2,
        decoder_attention_heads=2,
        encoder_ffn_dim=32,
        decoder_ffn_dim=32,
        input_feat_per_channel=8,
        conv_channels=8,
        max_source_positions=64,
        max_target_positions=32,
        pad_token_id=0,
    )
    features = {
        "input_features": torch.randn(2, 32, 8),
        "attention_mask": torch.ones(2, 32, dtype=torch.long),
    }
    return Speech2TextForConditionalGeneration(config), {**features, "labels": tokens()}


def _blip() -> Made:
    """All its labels are ignored."""
    from transformers import BlipConfig, BlipForConditionalGeneration

    part = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = BlipConfig(
        text_config={
            **part,
            "vocab_size": 32,
            "encoder_hidden_size": 16,
            "max_position_embeddings": 32,
            "bos_token_id": 1,
            "eos_token_id": 2,
            "pad_token_id": 0,
            "sep_token_id": 2,
        },
        vision_config={**part, "image_size": 16, "patch_size": 8},
        projection_dim=8,
        image_text_hidden_size=8,
    )
    inputs = {"pixel_values": torch.randn(2, 3, 16, 16), "input_ids": tokens()}
    return BlipForConditionalGeneration(config), {**inputs, "labels": torch.full((2, 8), -100)}


def reformer() -> Made:
    """Seeds torch's generator anew from the operating system in each forward (`torch.seed()`), for its dropout."""
    from transformers import ReformerConfig, ReformerModelWithLMHead

    config = ReformerConfig(
        vocab_size=32,
        hidden_size=16,
        attention_head_size=8,
        num_attention_heads=2,
        feed_forward_size=32,
        attn_layers=["local", "lsh"],
        axial_pos_shape=[4, 4],
        axial_pos_embds_dim=[8, 8],
        max_position_embeddings=16,
        lsh_attn_chunk_length=4,
        local_attn_chunk_length=4,
        num_buckets=4,
        is_decoder=True,
    )
    ids = tokens(16)
    return ReformerModelWithLMHead(config), {"input_ids": ids, "labels": ids}


#: By the op that reads what is hidden.
HIDING: dict[str, Callable[[], Made]] = {
    "Longformer, index_put_": _longformer,
    "EnCodec, gt.Tensor": _encodec,
    "Gemma 3n, ge.Scalar": _gemma_3n,
    "SEW-D, le.Scalar": _sew_d,
    "Speech2Text, mul.Tensor": _speech_2_text,
    "BLIP, nll_loss_forward": _blip,
}
