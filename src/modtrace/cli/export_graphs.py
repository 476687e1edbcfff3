"""Exports the graph of one step for `modtrace export`."""

from pathlib import Path

from ..analysis.graph_build import build_graph
from ..analysis.graph_items import Seen, close_below
from ..analysis.graph_parts import WHOLE, Part
from ..analysis.graph_view import GraphView
from ..analysis.graph_visible import build_view
from ..model_graph import ModelGraph, graph_of
from ..recording.protocols import RecordingData
from ..views import graphml, model_explorer
from .export_formats import ExportOptions
from .readable import at_depth
from .with_ops import with_step

#: Deeper than any module lies.
_ALL_LEVELS = 2**31


def write_graphml(data: RecordingData, path: Path, options: ExportOptions) -> None:
    """The graph, with everything in it open unless a depth was asked for."""
    graphml.write_graphml(_view(data, options), path)


def write_model_explorer(data: RecordingData, path: Path, options: ExportOptions) -> list[Path]:
    """The graph, as for GraphML, and the node data beside it; what is no regular file gets the graph alone."""
    view = _view(data, options)
    model_explorer.write_model_explorer(view, path)
    if not path.is_file():
        return []
    return [path, *model_explorer.write_node_data(view, path)]


def write_dot(data: RecordingData, path: Path, options: ExportOptions) -> None:
    """The picture of the graph in the language of Graphviz."""
    _drawn(data, options).write_dot(path)


def write_svg(data: RecordingData, path: Path, options: ExportOptions) -> None:
    """The picture of the graph."""
    _drawn(data, options).write_svg(path)


def write_png(data: RecordingData, path: Path, options: ExportOptions) -> None:
    """The picture of the graph."""
    _drawn(data, options).write_png(path)


def _drawn(data: RecordingData, options: ExportOptions) -> ModelGraph:
    """What `modtrace graph` draws, too: alike modules folded, without view ops, at a depth that can be read."""
    whole = with_step(lambda: graph_of(data, options.step))
    part = whole if options.phase is None else whole.filter(phase=options.phase)
    return at_depth(part.without_views().fold(), options.depth, is_drawn=True)[0]


def _view(data: RecordingData, options: ExportOptions) -> GraphView:
    part = WHOLE if options.phase is None else Part(phases=(options.phase,))
    graph = with_step(lambda: build_graph(data, step=options.step, part=part))
    depth = _ALL_LEVELS if options.depth is None else options.depth
    return build_view(graph, Seen(closed=close_below(graph, depth)))
