"""Draws a map of the activations and gradients of every layer of a small transformer, one path a token.

    python examples/activation_map.py -o map.png
    python examples/activation_map.py -o map.png --umap

A GPT-2 of six layers, made from its configuration, learns Python's own documentation byte by byte for a few seconds.
Then one more step is recorded: what each block returns, and its gradient, whole. `rec.stack` gives both as
arrays (layer, token, width), which are projected to the plane and drawn: where each token stands behind every block,
and where the gradient of the loss points there. A token's activations tell what it is, its gradients what comes next:
so the panels below are coloured by the byte of the token, and by the byte that follows.
"""

import argparse
import string
from collections.abc import Sequence
from pydoc_data.topics import topics
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

import modtrace

BLOCKS = "transformer.h.*"

#: What bytes are coloured by, and how: colours that also those who see few colours tell apart.
KINDS = {
    "vowel": ("aeiouAEIOU", "#D55E00"),
    "consonant": (string.ascii_letters, "#0072B2"),
    "space": (string.whitespace, "#999999"),
    "digit or sign": (string.printable, "#009E73"),
}

Points = npt.NDArray[np.float32]


def make_model(layers: int, width: int, context: int) -> nn.Module:
    """A GPT-2 that reads bytes, with random weights."""
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(
        vocab_size=256,
        n_positions=context,
        n_embd=width,
        n_layer=layers,
        n_head=4,
        bos_token_id=0,
        eos_token_id=0,
        resid_pdrop=0,
        embd_pdrop=0,
        attn_pdrop=0,
    )
    return GPT2LMHeadModel(config)


def read_text() -> Tensor:
    """The documentation of Python's statements and types as bytes."""
    return torch.frombuffer(bytearray("\n".join(topics.values()).encode()), dtype=torch.uint8).long()


def batch_of(text: Tensor, size: int, context: int) -> Tensor:
    """Passages from random places."""
    starts = torch.randint(len(text) - context, (size, 1))
    return text[starts + torch.arange(context)]


def train(model: nn.Module, text: Tensor, steps: int, context: int) -> float:
    """Takes some steps, and returns the last loss."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    warm_up = torch.optim.lr_scheduler.LinearLR(optimizer, 0.02, total_iters=50)
    loss = torch.tensor(float("nan"))
    for _ in range(steps):
        tokens = batch_of(text, 16, context)
        loss = model(tokens, labels=tokens).loss
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        warm_up.step()
    return loss.item()


def record_step(model: nn.Module, tokens: Tensor) -> tuple[Points, Points]:
    """Activations and gradients behind every block: (layer, token, width)."""
    blocks = modtrace.Capture(roles=("output", "grad_output"), include=BLOCKS, tensors=True)
    with modtrace.record(model, values=blocks) as recording:
        model(tokens, labels=tokens).loss.backward()
    forward = recording.stack(BLOCKS, role="output")
    backward = recording.stack(BLOCKS, role="grad_output")
    return _by_token(forward.values), _by_token(backward.values)


def _by_token(values: npt.NDArray[Any]) -> Points:
    """All passages one behind the other, without their last tokens: nothing follows those."""
    return values[:, :, :-1].reshape(len(values), -1, values.shape[-1])


def project(points: Points, *, umap: bool) -> Points:
    """Points of the plane, (layer, token, 2), of vectors that were brought to one length."""
    length = np.linalg.norm(points, axis=-1, keepdims=True)
    flat = (points / np.maximum(length, 1e-30)).reshape(-1, points.shape[-1])
    plane = _umap(flat) if umap else _principal(flat)
    return plane.reshape(*points.shape[:-1], 2)


def _principal(flat: Points) -> Points:
    """The two directions in which the vectors differ most."""
    centred = flat - flat.mean(axis=0)
    _, _, directions = np.linalg.svd(centred, full_matrices=False)
    return centred @ directions[:2].T


def _umap(flat: Points) -> Points:
    try:
        from umap import UMAP
    except ImportError:
        raise SystemExit(
            "--umap needs umap-learn: pip install umap-learn. Without --umap, PCA is used."
        ) from None
    plane: Points = UMAP(random_state=0).fit_transform(flat)
    return plane


def kind_of(byte: int) -> str:
    """The kind of a byte, by the first of `KINDS` that has it."""
    return next((kind for kind, (members, _) in KINDS.items() if chr(byte) in members), "digit or sign")


def draw(planes: Sequence[Points], passages: Tensor, how: str, path: str) -> None:
    """Forward and backward side by side: above coloured by layer, below by the kind of byte."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9.6, 9), dpi=80, layout="constrained")
    axes = figure.subplots(2, 2)
    titles = [
        ("activations", "by the byte of the token", passages[:, :-1]),
        ("gradients", "by the byte that comes next", passages[:, 1:]),
    ]
    for column, (title, below, bytes_) in enumerate(titles):
        shown = _draw_by_layer(axes[0, column], planes[column])
        _draw_by_kind(axes[1, column], planes[column], bytes_.flatten().tolist())
        axes[0, column].set_title(f"{title} behind every block", loc="left")
        axes[1, column].set_title(f"{title} {below}", loc="left")
    layers = planes[0].shape[0]
    bar = figure.colorbar(shown, ax=axes[0], pad=0.01, aspect=30, ticks=range(layers))
    bar.set_label("behind block")
    figure.legend(*axes[1, 0].get_legend_handles_labels(), loc="outside lower center", ncols=4, frameon=False)
    figure.suptitle(f"{how}: a path through {layers} blocks for each of {planes[0].shape[1]} tokens")
    for ax in axes.flat:
        ax.set(xticks=[], yticks=[])
        ax.spines[:].set_color("#CCCCCC")
    figure.savefig(path)


def _draw_by_layer(ax: Any, points: Points) -> Any:
    from matplotlib.collections import LineCollection

    layers, tokens, _ = points.shape
    pieces = np.stack([points[:-1], points[1:]], axis=2).reshape(-1, 2, 2)
    look = {"cmap": _steps("viridis", layers), "clim": (-0.5, layers - 0.5), "rasterized": True}
    behind = np.repeat(np.arange(layers), tokens)
    ax.add_collection(LineCollection(list(pieces), array=behind[tokens:], alpha=0.15, linewidth=0.6, **look))
    shown = ax.scatter(*points.reshape(-1, 2).T, c=behind, s=4, linewidth=0, **look)
    ax.autoscale()
    return shown


def _steps(name: str, count: int) -> Any:
    from matplotlib import colormaps

    return colormaps[name].resampled(count)


def _draw_by_kind(ax: Any, points: Points, bytes_: Sequence[int]) -> None:
    kinds = np.array([kind_of(each) for each in bytes_])
    for kind, (_, color) in KINDS.items():
        of_kind = points[:, kinds == kind]
        ax.plot(of_kind[..., 0], of_kind[..., 1], color=color, alpha=0.12, linewidth=0.5, rasterized=True)
        ax.scatter(*of_kind[-1].T, color=color, s=8, linewidth=0, label=kind, rasterized=True)


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("-o", "--output", default="activation_map.png", help="a .png, .svg or .pdf")
    parser.add_argument("--steps", type=int, default=200, help="of training before")
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--width", type=int, default=96)
    parser.add_argument("--context", type=int, default=64, help="bytes in a passage")
    parser.add_argument("--passages", type=int, default=10, help="in the step that is drawn")
    parser.add_argument("--umap", action="store_true", help="project with umap-learn instead of PCA")
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> None:
    args = parse(argv)
    torch.manual_seed(0)
    text = read_text()
    model = make_model(args.layers, args.width, args.context)
    loss = train(model, text, args.steps, args.context)
    tokens = batch_of(text, args.passages, args.context)
    forward, backward = record_step(model, tokens)
    planes = [project(each, umap=args.umap) for each in (forward, backward)]
    draw(planes, tokens, "UMAP" if args.umap else "PCA", args.output)
    print(f"{args.output}: {len(forward)} layers, {forward.shape[1]} tokens, loss {loss:.3f}")


if __name__ == "__main__":
    main()
