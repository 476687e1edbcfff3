"""More transformers architectures than the ten of the ordinary tests: `make zoo`."""

import pytest

from helpers.architectures import TEXT, tokens

LLAMA_LIKE = {**TEXT, "intermediate_size": 32, "num_key_value_heads": 1}
BERT_LIKE = {**TEXT, "intermediate_size": 32}

MORE = {
    "Qwen2ForCausalLM": LLAMA_LIKE,
    "Qwen3ForCausalLM": {**LLAMA_LIKE, "head_dim": 8},
    "MistralForCausalLM": LLAMA_LIKE,
    "GemmaForCausalLM": {**LLAMA_LIKE, "head_dim": 8},
    "PhiForCausalLM": {**TEXT, "intermediate_size": 32},
    "StableLmForCausalLM": LLAMA_LIKE,
    "OlmoForCausalLM": LLAMA_LIKE,
    "GPTNeoXForCausalLM": {**TEXT, "intermediate_size": 32},
    "FalconForCausalLM": TEXT,
    "BloomForCausalLM": {"vocab_size": 32, "hidden_size": 16, "n_layer": 2, "n_head": 2},
    "OPTForCausalLM": {**TEXT, "ffn_dim": 32, "word_embed_proj_dim": 16},
    "RobertaForMaskedLM": BERT_LIKE,
    "ElectraForMaskedLM": {**BERT_LIKE, "embedding_size": 16},
    "AlbertForMaskedLM": {**BERT_LIKE, "embedding_size": 16},
    "DistilBertForMaskedLM": {"vocab_size": 32, "dim": 16, "n_layers": 2, "n_heads": 2, "hidden_dim": 32},
}


@pytest.mark.zoo
@pytest.mark.parametrize("reentrant", [None, True, False], ids=["plain", "reentrant", "non-reentrant"])
@pytest.mark.parametrize("name", MORE)
def test_every_op_is_attributed_and_every_recompute_finds_its_original(seeded, name, reentrant):
    check(name, reentrant)


@pytest.mark.parametrize("name", ["Qwen2ForCausalLM", "BloomForCausalLM"])
def test_a_sample_of_the_zoo_is_attributed(seeded, name):
    check(name, False)


def check(name, reentrant):
    import transformers

    from helpers.comparing import compare

    kind = getattr(transformers, name)
    model = kind(kind.config_class(**MORE[name])).train()
    if reentrant is not None:
        if not model.supports_gradient_checkpointing:
            pytest.skip(f"{name} offers no gradient checkpointing")
        model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    ids = tokens()
    comparison = compare(model, lambda: model(input_ids=ids, labels=ids).loss)
    assert comparison.disagreements() == []
    phases = [true.phase for true, _ in comparison.pairs]
    assert phases.count("backward") > 100
    assert (phases.count("recompute") > 20) == (reentrant is not None)
