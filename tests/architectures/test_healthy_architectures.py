"""Architectures of transformers make no false alarm about NaN and infinite values, with padding on the left."""

import inspect
from typing import Any

import pytest
import torch
from torch import nn

import modtrace
from helpers.healthy_architectures import GPT_LIKE, HEALTHY
from helpers.nonfinite_models import record_training

transformers = pytest.importorskip("transformers")


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
