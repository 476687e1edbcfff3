"""`modtrace graph`: draws the execution graph of one step, or of a model that is called once."""

import json
from collections.abc import Callable
from pathlib import Path

import click

from ..api.graph import graph_of
from ..api.model_graph import ModelGraph
from ..recording.phase import PHASES
from ..recording.protocols import RecordingData
from ..views.common.columns import printable
from ..views.common.graph_summary import (
    NO_GRAPHML,
    describe_counts,
    explain_no_ops,
    render_graph,
    render_graph_json,
)
from ..views.common.numbers import format_bytes
from .factory import errors_of_call, load_factory, names_model
from .open_run import SHOWN_STEP, AskedStep, errors_of, open_with_rows, read_step, step_option, usage_errors
from .output import find_terminal, print_text, tell, wrap
from .readable import at_depth, require_nodes

#: The writers of pictures and files, by suffix.
_WRITERS: dict[str, Callable[..., None]] = {
    ".svg": ModelGraph.write_svg,
    ".png": ModelGraph.write_png,
    ".dot": ModelGraph.write_dot,
    ".gv": ModelGraph.write_dot,
    ".json": ModelGraph.write_model_explorer,
}
_DRAWN = frozenset({".svg", ".png", ".dot", ".gv"})

#: Graphviz lays out this many nodes in some 5 seconds, and ten times as many in some minutes.
_MOST_QUICK = 2_000


@click.command()
@click.argument("run", metavar="RUN|MODULE:FACTORY")
@click.option(
    "-o",
    "--output",
    "path",
    type=click.Path(path_type=Path),
    help=f"Where to write; {', '.join(_WRITERS)} (Model Explorer). Default: only say what is in it.",
)
@step_option(SHOWN_STEP)
@click.option(
    "--depth",
    type=click.IntRange(min=0),
    help="Levels below the roots. Default: as many as can be read.",
)
@click.option(
    "--collapse", multiple=True, metavar="PATH", help="Modules to show as single nodes: a glob over paths."
)
@click.option(
    "--fold/--no-fold",
    default=True,
    show_default=True,
    help="Show modules that are alike once.",
)
@click.option(
    "--phase", type=click.Choice(PHASES), multiple=True, help="Only ops of this phase. Default: all."
)
@click.option(
    "--path", "modules", metavar="PATH", help="Only these modules, with what is inside: a glob over paths."
)
@click.option("--op", multiple=True, metavar="NAME", help="Only ops of these names: a glob, such as '*mm'.")
@click.option(
    "--color", metavar="NUMBER", help="Colour nodes by time, flops, bytes, saved, rms or nonfinite."
)
@click.option("--views", is_flag=True, help="Show ops that only return views too: view, t, detach.")
@click.option("--tensors", is_flag=True, help="Show what ops return as nodes of their own.")
@click.option("--dpi", type=click.IntRange(min=10, max=1200), default=96, show_default=True, help="Of a PNG.")
@click.option(
    "--json",
    "as_json",
    is_flag=True,
    help="Nodes, edges and boxes, or what was written, as JSON.",
)
def graph(
    run: str,
    path: Path | None,
    step: AskedStep,
    depth: int | None,
    collapse: tuple[str, ...],
    fold: bool,
    phase: tuple[str, ...],
    modules: str | None,
    op: tuple[str, ...],
    color: str | None,
    views: bool,
    tensors: bool,
    dpi: int,
    as_json: bool,
) -> None:
    """Draws what ran in one step: modules, ops, parameters, and the tensors that lead from one to the other.

    RUN is a recording; without ops in it the calls are drawn in order. Alternatively, the model that MODULE:FACTORY
    makes is called once: FACTORY is a function of the Python module that takes no arguments and returns (model, args,
    kwargs).
    """
    writer = _find_writer(path)
    data = _record(run) if names_model(run) else open_with_rows(run, "calls")
    number = read_step(run, data, step)
    with errors_of(run, data, option="--step"):
        whole = graph_of(data, number)
    shown = whole
    with usage_errors():
        if phase or modules is not None or op:
            shown = shown.filter(phase=phase or None, path=modules, op=op or None)
        shown = shown if views else shown.without_views()
        shown = shown.collapse(*collapse) if collapse else shown
    shown = shown.with_tensors() if tensors else shown
    with errors_of(run, data, option="--step"):
        require_nodes(whole, shown)
    shown = shown.fold() if fold else shown
    shown, note = at_depth(shown, depth, is_drawn=path is not None and path.suffix.lower() in _DRAWN)
    if path is None and color is not None:
        raise click.UsageError("--color is for pictures: give -o with a name that ends in .svg, .png or .dot")
    if path is None or writer is None:
        width = find_terminal().width
        print_text(
            render_graph_json(shown.view)
            if as_json
            else render_graph(shown.view, width=width) + "draw it: -o FILE.svg\n"
        )
        return
    _write(writer, shown, path, color, dpi)
    _tell(shown, path, note, as_json)


def _find_writer(path: Path | None) -> Callable[..., None] | None:
    if path is None:
        return None
    if path.suffix.lower() == ".graphml":
        raise click.BadParameter(f"{path}: {NO_GRAPHML}.", param_hint="--output")
    if path.suffix.lower() not in _WRITERS:
        raise click.BadParameter(
            f"{path}: its name tells no format; it may end in {', '.join(_WRITERS)}", param_hint="--output"
        )
    return _WRITERS[path.suffix.lower()]


def _record(text: str) -> RecordingData:
    from ..replay.one_call import record_call

    loaded = load_factory(text)
    with errors_of_call(text):
        return record_call(loaded.model, loaded.args, loaded.kwargs)


def _write(writer: Callable[..., None], shown: ModelGraph, path: Path, color: str | None, dpi: int) -> None:
    options: dict[str, object] = {}
    if path.suffix.lower() in _DRAWN:
        options["color"] = color
    elif color is not None:
        raise click.BadParameter(f"{path.suffix} has no colours", param_hint="--color")
    if path.suffix.lower() == ".png":
        options["dpi"] = dpi
    if path.suffix.lower() in (".svg", ".png") and len(shown.nodes) > _MOST_QUICK:
        note = (
            f"{len(shown.nodes):,} nodes may take graphviz minutes; --path, --phase and --op choose fewer.\n"
        )
        click.echo(wrap(note), nl=False, err=True)
    with usage_errors():
        writer(shown, path, **options)


def _tell(shown: ModelGraph, path: Path, note: str, as_json: bool) -> None:
    """Prints what was written."""
    size = path.stat().st_size if path.is_file() else None
    if as_json:
        told = {"path": str(path), "size_bytes": size, "nodes": len(shown.nodes), "edges": len(shown.edges)}
        note = json.dumps({**told, "marks": shown.view.marks}) + "\n"
    else:
        marks = "".join(f"! {printable(mark)}\n" for mark in shown.view.marks)
        missing = f"{explain_no_ops()}\n" if shown.view.step is not None and not shown.view.has_ops else ""
        taken = "" if size is None else f" ({format_bytes(size)})"
        note = wrap(f"{marks}{note}{missing}{path}: {describe_counts(shown.view)}{taken}\n")
    tell(note, path)
