"""Makes the pictures of the gallery, beside this file: `python docs/gallery/make_gallery.py`, with `dot` installed."""

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import modtrace

HERE = Path(__file__).resolve().parent
EXAMPLES = HERE.parent.parent / "examples"


class Timeless(modtrace.GraphStyle):
    """Tells no times, so that the pictures are the same whenever they are made."""

    def tooltip(self, item: Any) -> str:
        return super().tooltip(item._replace(duration_ns=0))


class Speaker(nn.Module):
    """An LSTM between an embedding and a linear layer."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(100, 32)
        self.lstm = nn.LSTM(32, 64, num_layers=2, batch_first=True)
        self.head = nn.Linear(64, 10)

    def forward(self, tokens: Tensor) -> Tensor:
        heard, _ = self.lstm(self.embed(tokens))
        return self.head(heard[:, -1])


class Refiner(nn.Module):
    """Calls one of its modules three times."""

    def __init__(self) -> None:
        super().__init__()
        self.encode = nn.Linear(16, 32)
        self.refine = nn.Sequential(nn.Linear(32, 32), nn.ReLU())
        self.decode = nn.Linear(32, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.encode(x)
        for _ in range(3):
            x = x + self.refine(x)
        return self.decode(x)


def resnet18() -> tuple[nn.Module, tuple[Any, ...], dict[str, Any]]:
    """The model, its arguments, and none by name: a factory as `modtrace graph MODULE:FACTORY` takes."""
    return _example("resnet18_paths").resnet18().eval(), (torch.zeros(1, 3, 224, 224),), {}


def gpt() -> tuple[nn.Module, tuple[Any, ...], dict[str, Any]]:
    return _gpt(None), (torch.zeros(2, 32, dtype=torch.int64),), {}


def lstm() -> tuple[nn.Module, tuple[Any, ...], dict[str, Any]]:
    return Speaker().eval(), (torch.zeros(4, 12, dtype=torch.int64),), {}


def refiner() -> tuple[nn.Module, tuple[Any, ...], dict[str, Any]]:
    return Refiner(), (torch.zeros(2, 16),), {}


def forward(factory: Callable[[], tuple[nn.Module, tuple[Any, ...], dict[str, Any]]]) -> modtrace.ModelGraph:
    """The graph of one forward, without what only looks at a tensor in another shape."""
    model, args, kwargs = factory()
    with torch.no_grad():
        return modtrace.graph(model, *args, **kwargs).without_views()


def training_step() -> modtrace.ModelGraph:
    """Forward, loss, backward with recompute, and AdamW of a GPT whose blocks are checkpointed."""
    model = _gpt("non-reentrant")
    optimizer = torch.optim.AdamW(model.parameters())
    tokens, targets = torch.zeros(2, 32, dtype=torch.int64), torch.zeros(2, 32, dtype=torch.int64)
    with modtrace.record(model, ops=True, values=None) as recording:
        loss = F.cross_entropy(model(tokens).flatten(0, 1), targets.flatten())
        loss.backward()
        optimizer.step()
    return recording.graph().without_views()


def _gpt(checkpointing: str | None) -> nn.Module:
    return _example("train_gpt").GPT(
        100, layers=4, width=64, heads=4, context=32, checkpointing=checkpointing
    )


def _example(name: str) -> Any:
    sys.path.insert(0, str(EXAMPLES))
    try:
        return __import__(name)
    finally:
        sys.path.remove(str(EXAMPLES))


def main() -> None:
    torch.manual_seed(0)
    style = Timeless()
    resnet, step = forward(resnet18), training_step()
    for depth in range(4):
        resnet.collapse(depth=depth).write_svg(HERE / f"resnet18-depth{depth}.svg", style=style)
    resnet.write_svg(HERE / "resnet18-full.svg", style=style)
    resnet.collapse(depth=2).write_svg(HERE / "resnet18-flops.svg", style=style, color="flops")
    forward(gpt).fold().collapse(depth=2).write_svg(HERE / "gpt-depth2.svg", style=style)
    forward(gpt).fold().write_svg(HERE / "gpt-full.svg", style=style)
    forward(lstm).write_svg(HERE / "lstm.svg", style=style)
    forward(refiner).write_svg(HERE / "called-three-times.svg", style=style)
    for depth in (1, 2, 3):
        step.fold().collapse(depth=depth).write_svg(HERE / f"training-step-depth{depth}.svg", style=style)


if __name__ == "__main__":
    main()
