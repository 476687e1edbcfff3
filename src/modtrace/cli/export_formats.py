"""The formats of `modtrace export`: a format is added as one entry of `FORMATS`."""

import importlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click

from ..recording.protocols import RecordingData
from ..store.layout import is_url
from ..views.common.graph_summary import NO_GRAPHML


@dataclass(frozen=True, kw_only=True)
class ExportOptions:
    """The part of the recording to export; None stands for everything that the format can hold, or its default."""

    step: int | None = None
    depth: int | None = None  # the number of levels of modules
    phase: str | None = None


#: A function that writes the export to a path, completely or not at all; it returns the files if that is a folder.
Writer = Callable[[RecordingData, Any, ExportOptions], Sequence[Path | str] | None]


@dataclass(frozen=True, kw_only=True)
class ExportFormat:
    """The properties of a format, and the function that writes it."""

    writer: str  # `module:function` of a `Writer`, imported when it is called
    suffixes: tuple[str, ...]  # suffixes of paths that imply this format
    about: str  # the end of the sentence `parquet: ...`
    tables: tuple[str, ...] = ()  # tables that must have rows
    takes: frozenset[str] = frozenset()  # names of `ExportOptions` that the format uses

    def load_writer(self) -> Writer:
        """Returns the function that writes the format."""
        module, _, name = self.writer.partition(":")
        writer: Writer = getattr(importlib.import_module(module), name)
        return writer


def _of_graph(name: str, *suffixes: str, about: str) -> ExportFormat:
    """Returns a format that is written by `export_writers.write_<name>`."""
    return ExportFormat(
        writer=f"modtrace.cli.export_writers:write_{name}",
        suffixes=suffixes,
        about=about,
        tables=("calls",),
        takes=frozenset({"step", "depth", "phase"}),
    )


FORMATS: dict[str, ExportFormat] = {
    "parquet": ExportFormat(
        writer="modtrace.cli.export_writers:write_parquet",
        suffixes=(".parquet",),
        about="a folder that DuckDB, Polars and pandas query, many runs and ranks together",
    ),
    "csv": ExportFormat(
        writer="modtrace.cli.export_writers:write_csv",
        suffixes=(".csv",),
        about="a folder with a CSV file for each table",
    ),
    "tensorboard": ExportFormat(
        writer="modtrace.cli.export_writers:write_tensorboard",
        suffixes=(".tensorboard",),
        about="a folder of events: logged numbers, statistics that move most, heat maps, histograms",
        tables=("steps",),
    ),
    "trace": ExportFormat(
        writer="modtrace.cli.export_writers:write_trace",
        suffixes=(".trace.json", ".perfetto.json"),
        about="when what ran, for ui.perfetto.dev and Chrome",
        tables=("calls",),
        takes=frozenset({"step"}),
    ),
    "model-explorer": _of_graph(
        "model_explorer", ".json", about="the graph of one step with its numbers, for Google's Model Explorer"
    ),
    "svg": _of_graph("svg", ".svg", about="a picture of the graph of one step, as modtrace graph draws it"),
    "png": _of_graph("png", ".png", about="the same as pixels"),
    "dot": _of_graph("dot", ".dot", ".gv", about="the same in the language of Graphviz"),
}


class FormatName(click.Choice):  # type: ignore[type-arg]  # no parameter before click 8.2
    """The name of a format on the command line."""

    def __init__(self) -> None:
        super().__init__(list(FORMATS))

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:
        if value == "graphml":
            self.fail(f"{NO_GRAPHML}.", param, ctx)
        return str(super().convert(value, param, ctx))


class Destination(click.ParamType):  # type: ignore[type-arg]  # no parameter before click 8.2
    """A path, or as a text the URL of a folder on an object store."""

    name = "path"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Path | str:
        return str(value) if is_url(value) else Path(value)


def find_format(name: str | None, path: Path | str) -> str:
    """Returns the name of the requested format, or else of the one that the path's suffix implies.

    Raises:
        click.UsageError: the suffix implies no format, or the format is not written to a URL.
    """
    if isinstance(path, str):
        if name not in (None, "parquet"):
            raise click.UsageError(
                f"{path}: {name} is written to a path on this machine, parquet also to a URL."
            )
        return "parquet"
    if name is not None:
        return name
    for known, kind in FORMATS.items():
        if path.name.lower().endswith(kind.suffixes):
            return known
    if path.suffix.lower() == ".graphml":
        raise click.UsageError(f"{path}: {NO_GRAPHML}.")
    raise click.UsageError(f"{path}: its name tells no format. Give --format, one of: {', '.join(FORMATS)}")


def check_options(name: str, options: Mapping[str, object]) -> None:
    """Refuses options that the format does not use; None stands for an option that was not given.

    Raises:
        click.UsageError: such an option was given.
    """
    for option, given in options.items():
        if given is not None and option not in FORMATS[name].takes:
            raise click.UsageError(f"--{option}: {name} holds the whole recording. Leave the option out.")
