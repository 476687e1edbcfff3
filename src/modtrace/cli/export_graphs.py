"""Exports the graph of one step for `modtrace export`."""

from pathlib import Path

from ..analysis.graph_build import build_graph
from ..analysis.graph_items import Seen, close_below
from ..analysis.graph_parts import WHOLE, Part
from ..analysis.graph_view import GraphView
from ..analysis.graph_visible import build_view
from ..recording.protocols import RecordingData
from ..views import graphml, model_explorer
from .export_formats import ExportOptions
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


def _view(data: RecordingData, options: ExportOptions) -> GraphView:
    part = WHOLE if options.phase is None else Part(phases=(options.phase,))
    graph = with_step(lambda: build_graph(data, step=options.step, part=part))
    depth = _ALL_LEVELS if options.depth is None else options.depth
    return build_view(graph, Seen(closed=close_below(graph, depth)))
