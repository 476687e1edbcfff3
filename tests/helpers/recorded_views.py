"""Views of the graphs of models that were trained for one step."""

import sys
from pathlib import Path

import torch
from torch import nn

import modtrace
from helpers.architectures import ARCHITECTURES
from modtrace.analysis.graph.build import build_graph
from modtrace.analysis.graph_view.build import build_view
from modtrace.analysis.graph_view.fold import fold_graph
from modtrace.analysis.graph_view.items import Seen, close_below
from modtrace.analysis.graph_view.records import GraphView
from modtrace.recording.protocols import RecordingData

_EXAMPLES = Path(__file__).parent.parent.parent / "examples"
_ALL_LEVELS = 1_000_000


def record_gpt(checkpointing: str | None = None) -> RecordingData:
    """One training step of the GPT of `make demo`, made small."""
    if str(_EXAMPLES) not in sys.path:
        sys.path.append(str(_EXAMPLES))
    from train_gpt import GPT

    torch.manual_seed(0)
    model = GPT(32, layers=2, width=16, heads=2, context=8, checkpointing=checkpointing)
    tokens = torch.randint(32, (2, 9))
    optimizer = torch.optim.AdamW(model.parameters())
    with modtrace.record(model, ops=True, strict=True) as rec:
        logits = model(tokens[:, :-1])
        nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten()).backward()
        optimizer.step()
    return rec.data


def record_architecture(name: str) -> RecordingData:
    """Forward and backward of a transformers architecture."""
    torch.manual_seed(0)
    model, inputs = ARCHITECTURES[name]()
    with modtrace.record(model, ops=True, strict=True) as rec:
        model(**inputs).loss.backward()
    return rec.data


def view_of(
    data: RecordingData, *, depth: int = _ALL_LEVELS, folded: bool = False, tensors: bool = False
) -> GraphView:
    """The graph with everything in it open, unless something else is asked for."""
    graph = build_graph(data)
    folding = fold_graph(graph) if folded else None
    return build_view(graph, Seen(closed=close_below(graph, depth), folding=folding, tensors=tensors))
