"""Architectures of transformers from tiny configs: the class of each model, and its config."""

from typing import Any

from helpers.architectures import TEXT

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
