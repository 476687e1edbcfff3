"""The whole text of what is written in pieces."""

from modtrace.analysis.graph_view.records import GraphView
from modtrace.analysis.timeline.timeline import Timeline
from modtrace.views.formats.model_explorer import iterate_model_explorer
from modtrace.views.formats.perfetto import iterate_perfetto


def render_perfetto(timeline: Timeline) -> str:
    """The text of a trace."""
    return "".join(iterate_perfetto(timeline))


def render_model_explorer(view: GraphView, name: str) -> str:
    """The text of a graph for Model Explorer."""
    return "".join(iterate_model_explorer(view, name))
