"""Writes what `modtrace export` exports: whole tables, the timeline, or the graph of one step."""

from pathlib import Path

from ..analysis.timeline.timeline import build_timeline
from ..api.graph import graph_of
from ..api.model_graph import ModelGraph
from ..recording.options.schedule import ALL_STEPS, StepRange
from ..recording.protocols import RecordingData
from ..store.csv_tables import write_csv as write_tables
from ..store.parquet import write_parquet as write_rank
from ..store.reader import FolderReader, open_ranks
from ..views.formats import model_explorer
from ..views.formats.perfetto import write_perfetto
from ..views.plot import tensorboard
from .export_formats import ExportOptions
from .readable import at_depth, require_nodes


def write_parquet(data: RecordingData, path: Path | str, options: ExportOptions) -> list[str]:
    """Writes all ranks of the recording, each to files of its own."""
    if not isinstance(data, FolderReader):
        return write_rank(data, path)
    return [file for rank in open_ranks(data) for file in write_rank(rank.data, path, name=rank.name)]


def write_csv(data: RecordingData, path: Path, options: ExportOptions) -> list[Path]:
    """Writes a CSV file for each table of the selected rank."""
    return write_tables(data, path)


def write_tensorboard(data: RecordingData, path: Path, options: ExportOptions) -> list[Path]:
    """Writes one file of events of the selected rank into a folder."""
    return [tensorboard.write_tensorboard(data, path)]


def write_trace(data: RecordingData, path: Path, options: ExportOptions) -> None:
    """Writes all steps, or the one that was requested."""
    step = options.step
    steps = ALL_STEPS if step is None else StepRange(step, step + 1)
    write_perfetto(build_timeline(data, steps=steps), path)


def write_model_explorer(data: RecordingData, path: Path, options: ExportOptions) -> list[Path]:
    """Writes the graph, with all layers open unless a depth is given, and the node data beside it.

    If the path is not a regular file, only the graph is written.
    """
    view = at_depth(_part(data, options), options.depth, is_drawn=False)[0].view
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


def _part(data: RecordingData, options: ExportOptions) -> ModelGraph:
    whole = graph_of(data, options.step)
    return whole if options.phase is None else require_nodes(whole, whole.filter(phase=options.phase))
