"""Exports the graph of one step for `modtrace export`."""

from pathlib import Path

from ..analysis.graph_view.records import GraphView
from ..make_graph import graph_of
from ..model_graph import ModelGraph
from ..recording.protocols import RecordingData
from ..views.formats import graphml, model_explorer
from .export_formats import ExportOptions
from .readable import at_depth
from .with_ops import require_part


def write_graphml(data: RecordingData, path: Path, options: ExportOptions) -> None:
    """Writes the graph, with all layers open unless a depth is given."""
    graphml.write_graphml(_view(data, options), path)


def write_model_explorer(data: RecordingData, path: Path, options: ExportOptions) -> list[Path]:
    """Writes the graph, as for GraphML, and the node data beside it.

    If the path is not a regular file, only the graph is written.
    """
    view = _view(data, options)
    model_explorer.write_model_explorer(view, path)
    if not path.is_file():
        return []
    return [path, *model_explorer.write_node_data(view, path)]


def write_dot(data: RecordingData, path: Path, options: ExportOptions) -> None:
    """Writes the picture of the graph in the DOT language of Graphviz."""
    _drawn(data, options).write_dot(path)


def write_svg(data: RecordingData, path: Path, options: ExportOptions) -> None:
    """Writes the picture of the graph as SVG."""
    _drawn(data, options).write_svg(path)


def write_png(data: RecordingData, path: Path, options: ExportOptions) -> None:
    """Writes the picture of the graph as PNG."""
    _drawn(data, options).write_png(path)


def _drawn(data: RecordingData, options: ExportOptions) -> ModelGraph:
    """Returns the graph as `modtrace graph` draws it: equal modules folded, without view ops, at a legible depth."""
    return at_depth(_part(data, options).without_views().fold(), options.depth, is_drawn=True)[0]


def _view(data: RecordingData, options: ExportOptions) -> GraphView:
    return at_depth(_part(data, options), options.depth, is_drawn=False)[0].view


def _part(data: RecordingData, options: ExportOptions) -> ModelGraph:
    whole = graph_of(data, options.step)
    return whole if options.phase is None else require_part(whole, whole.filter(phase=options.phase))
