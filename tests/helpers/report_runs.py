"""Recordings of which reports are tested in the browser."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

import modtrace
from modtrace.api.live import LiveRecording

sys.path.insert(0, str(Path(__file__).parent.parent.parent / "examples"))

import train_gpt


def record_gpt(
    to: Path,
    *,
    steps: int = 30,
    layers: int = 4,
    checkpoint: str | None = None,
    plant: bool = False,
) -> None:
    """Trains the GPT of the examples, smaller; `plant` puts its mistake into the third step."""
    torch.manual_seed(0)
    text = train_gpt.Text()
    model = train_gpt.GPT(
        len(text.characters), layers=layers, width=32, heads=2, context=32, checkpointing=checkpoint
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    with record_as_script(model, to) as rec:
        for step in range(steps):
            if plant and step == 2:
                model.blocks[-1].mlp.gelu = train_gpt.Overflow()
            tokens, targets = text.batch(2, 32)
            loss = F.cross_entropy(model(tokens).flatten(0, 1), targets.flatten())
            optimizer.zero_grad()
            loss.backward()
            norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            rec.log(loss=loss, norm=norm)


def record_resnet(to: Path) -> None:
    """Trains a ResNet-18 for two steps, on small pictures."""
    from transformers import ResNetConfig, ResNetForImageClassification

    torch.manual_seed(0)
    sizes = [16, 32, 64, 128]
    config = ResNetConfig(
        layer_type="basic", depths=[2, 2, 2, 2], embedding_size=16, hidden_sizes=sizes, num_labels=4
    )
    model = ResNetForImageClassification(config)
    inputs = {"pixel_values": torch.randn(2, 3, 32, 32), "labels": torch.tensor([1, 2])}
    _train(model, inputs, to)


def record_transformer(to: Path) -> None:
    """Trains a model of 24 layers of the library transformers for two steps, in bfloat16."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        num_hidden_layers=24,
        hidden_size=32,
        intermediate_size=64,
        num_attention_heads=2,
        num_key_value_heads=1,
        vocab_size=64,
    )
    tokens = torch.randint(64, (2, 16))
    _train(LlamaForCausalLM(config).to(torch.bfloat16), {"input_ids": tokens, "labels": tokens}, to)


def _train(model: torch.nn.Module, inputs: dict[str, torch.Tensor], to: Path) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    with record_as_script(model, to) as rec:
        for _ in range(2):
            loss = model(**inputs).loss
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            rec.log(loss=loss)


@contextmanager
def record_as_script(model: torch.nn.Module, to: Path, **options: Any) -> Iterator[LiveRecording]:
    """Records with ops, as from a script `train.py`: pictures of the page show the command."""
    command, sys.argv = sys.argv, ["train.py"]
    try:
        with modtrace.record(model, to, backward_times=True, ops=True, **options) as recording:
            yield recording
    finally:
        sys.argv = command
