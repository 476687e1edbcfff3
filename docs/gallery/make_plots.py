"""Makes the plots of the gallery, beside this file: `python docs/gallery/make_plots.py` (two minutes on one core)."""

import sys
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

import modtrace

HERE = Path(__file__).resolve().parent
EXAMPLES = HERE.parent.parent / "examples"

#: For six steps of the run the learning rate is 40 times what it should be.
STEPS, SPIKE = 160, range(90, 96)


def record_spike() -> modtrace.Recording:
    """A GPT of six blocks that learns, is thrown off by the spike, and recovers slowly."""
    torch.manual_seed(0)
    example = _example("train_gpt")
    text = example.Text()
    model = example.GPT(len(text.characters), layers=6, width=96, heads=4, context=64)
    gradients = modtrace.Capture(roles="grad_output", include="blocks.*.mlp.fc", stats=2)
    with modtrace.record(model, values=["stats", gradients]) as recording:
        _train(recording, model, text)
    return recording


def _train(recording: modtrace.LiveRecording, model: nn.Module, text: Any) -> None:
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, betas=(0.9, 0.95))
    for step in range(STEPS):
        for group in optimizer.param_groups:
            group["lr"] = 3e-3 * (40 if step in SPIKE else 1)
        tokens, targets = text.batch(8, 64)
        loss = F.cross_entropy(model(tokens).flatten(0, 1), targets.flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        recording.log(loss=loss)


def write_plots(recording: modtrace.Recording) -> None:
    """The pictures of docs/plots.md."""
    recording.write_plot(HERE / "plot-lines.png", "blocks.*")
    recording.write_plot(
        HERE / "plot-heatmap.png",
        ["blocks.*.attn.proj", "blocks.*.mlp.proj"],
        role="grad_output",
        kind="heatmap",
    )
    recording.write_plot(HERE / "plot-histogram.png", "blocks.0.mlp.fc", role="grad_output", kind="histogram")
    recording.write_plot(
        HERE / "plot-histogram-layers.png", "blocks.*.mlp.fc", role="grad_output", kind="histogram", step=80
    )


def _example(name: str) -> Any:
    sys.path.insert(0, str(EXAMPLES))
    try:
        return __import__(name)
    finally:
        sys.path.remove(str(EXAMPLES))


def write_map() -> None:
    """The picture of the example, with few colours: the file is a third as large."""
    from PIL import Image

    path = HERE / "activation-map.png"
    _example("activation_map").main(["-o", str(path)])
    with Image.open(path) as picture:
        few = picture.convert("RGB").quantize(160)
    few.save(path, optimize=True)


if __name__ == "__main__":
    write_plots(record_spike())
    write_map()
