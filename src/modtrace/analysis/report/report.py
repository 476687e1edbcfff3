"""Builds a report, i.e. everything that a page in the browser shows of a recording."""

import shlex
from collections.abc import Collection, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from ...recording.options.schedule import StepRange
from ...recording.phase import PHASES
from ...recording.protocols import RecordingData
from ...recording.suggestions import count_of
from ..compile.compilations import Compilations
from ..divergence.answer import Comparison
from ..divergence.run_pair import RunPair
from ..findings.all_checks import CHECKS
from ..findings.check import run_checks
from ..findings.finding import Finding
from ..findings.nonfinite_values import NONFINITE
from ..graph.build import build_graph
from ..graph.columns import Graph
from ..modules.module_tree import build_module_tree
from ..ops.memory_table import build_memory_table
from ..ops.op_table import build_op_table
from ..tables.chosen_step import StepSample
from ..tables.columns import Column, column_of
from ..tables.missing_rows import explain_empty, explain_none
from ..tables.ops import has_ops
from ..tables.tensors import shape_text
from ..timeline.arrange import SPAN_KINDS
from ..timeline.timeline import Timeline, build_timeline
from ..values.nonfinite import NonFinite
from .block_gradients import add_block_gradients
from .difference import ModuleDifference, unite_graphs
from .findings import FAILURES, Located, Origins, find_findings, find_nonfinite, find_origins
from .joined_graphs import JoinedGraphs
from .limits import GraphCut, Limits, choose_window, cut_graph, thin
from .module_series import choose_kept_steps, tabulate_module_series
from .modules import ModuleRows, Outputs, Place, list_modules, tabulate_modules
from .nodes import tabulate_edges, tabulate_nodes
from .parameters import tabulate_parameters
from .series import (
    RoleValues,
    count_cells,
    count_histograms,
    read_measured,
    steps_of,
    tabulate_histograms,
    tabulate_series,
    tabulate_sites,
)
from .spans import SPAN_DETAILS, find_start, list_lanes, number_steps, tabulate_spans, tabulate_steps
from .tables import NONE, Report, ReportTable, number_column

_OP = SPAN_KINDS.index("op")


def build_report(
    data: RecordingData,
    limits: Limits,
    *,
    step: int | None = None,
    comparison: Comparison | None = None,
    names: tuple[str, str] = ("first run", "second run"),
) -> Report:
    """Returns the report of a recording.

    Args:
        data: the recording.
        limits: how many rows the large tables may have.
        step: the number of the step whose calls and ops are shown; None chooses the step in which the first NaN or
            infinite values came up, the compared runs part or the run failed, and otherwise the one that
            `build_module_tree` chooses.
        comparison: the comparison with another recording. Its differences become findings, and the tables of modules
            and of the graph show both recordings: of ranks that were compared one by one, the rank where they part.
        names: the names of the two recordings.

    Raises:
        ValueError: the recording has no such step.
    """
    if comparison is not None and comparison.pair is not None:
        data = comparison.pair.own
    nonfinite = find_nonfinite(data)
    steps = number_steps(data)
    answer = run_checks(data, CHECKS, ignore=(NONFINITE.name,))
    checked = answer.findings
    chosen = _choose_step(nonfinite, comparison, checked, steps) if step is None else step
    shown = _show_step(data, limits, steps, chosen, comparison.pair if comparison is not None else None)
    second = shown.second
    series = _choose_series(data, limits, shown.number)
    located = Located(shown.rows.index, shown.graph, shown.cut, steps, second.graphs if second else None)
    findings = tuple(find_findings(data, nonfinite, comparison, checked, shown.compilations, located))
    tables = _tabulate_step(data, shown, find_origins(findings), series.measured, steps)
    kept = choose_kept_steps(data, shown.rows, limits.values, shown.number)
    of_steps = tabulate_module_series(data, shown.rows, tables["modules"], steps, kept)
    if second is not None:
        tables = {**tables, **_unite(shown, second, tables)}
    return Report(
        title=_name(data.meta.argv) if comparison is None else " against ".join(names),
        about=tuple(_about(data)),
        notes=(*_describe_missing(data, steps, shown, series), *answer.describe_unchecked()),
        shown_step=int(np.searchsorted(steps, shown.number)) if shown.number is not None else NONE,
        medians=shown.sample.describe() if shown.sample is not None else "",
        tables={
            **tables,
            **of_steps,
            **_tabulate_series(series, shown, steps),
            "steps": tabulate_steps(data, steps, find_start(data)),
        },
        lanes=list_lanes(shown.timeline) if shown.timeline else (),
        dimensions={"phase": PHASES, "rank": (str(data.meta.rank),)},
        findings=findings,
        compared=names if comparison is not None else (),
    )


@dataclass(frozen=True, eq=False)
class _ShownStep:
    """The analyses of the shown step."""

    number: int | None
    alone: int | None  # the step if it is shown alone; None if modules have the medians of several
    sample: StepSample | None  # the steps of which modules have the medians
    rows: ModuleRows
    graph: Graph
    cut: GraphCut
    timeline: Timeline | None  # the timeline of the steps around the shown one
    compilations: Compilations | None
    device_times: bool  # whether the times of modules are device times
    second: "_Second | None" = None  # the same of the second run, if two are shown


@dataclass(frozen=True, eq=False)
class _Second:
    """The second run, and how the first differs from it."""

    data: RecordingData
    shown: _ShownStep
    modules: ModuleDifference
    graphs: JoinedGraphs


@dataclass(frozen=True, eq=False)
class _ShownSeries:
    """The measured values over the steps, with the numbers of the steps."""

    measured: list[RoleValues]
    every: Column  # the steps in which something was measured
    steps: Column  # the steps whose statistics are shown
    binned: Column  # the steps whose histograms are shown


def _choose_step(
    nonfinite: Sequence[NonFinite],
    comparison: Comparison | None,
    checked: Sequence[Finding],
    steps: Column,
) -> int | None:
    """Returns the first step that a finding is about; None if there is none."""
    about: list[int | None] = []
    about += [divergence.step for divergence in comparison.divergences] if comparison is not None else []
    about += [answer.step for answer in nonfinite[:1]]
    about += [finding.step for finding in checked if finding.check in FAILURES]
    return next((step for step in about if step in steps), None)


def _show_step(
    data: RecordingData,
    limits: Limits,
    steps: Column,
    step: int | None,
    pair: RunPair | None = None,
    apart: Mapping[Place, Hashable] | None = None,
) -> _ShownStep:
    tree = build_module_tree(data, step=step)
    number = tree.step.step if tree.step else None
    timeline = _build_timeline(data, steps, limits.spans, number)
    graph = build_graph(data, step=number)
    second = _show_second(pair, limits, number, graph, step) if pair is not None else None
    rows = list_modules(tree, second.modules.apart if second is not None else apart)
    cut = cut_graph(graph, limits.nodes)
    sample = tree.step.sample if tree.step else None
    return _ShownStep(
        number, step, sample, rows, graph, cut, timeline, tree.compilations, tree.device_times, second
    )


def _show_second(
    pair: RunPair, limits: Limits, number: int | None, graph: Graph, alone: int | None
) -> _Second | None:
    """Returns the step of the second run that corresponds to a step of the first; None if there is none."""
    partner = dict(pair.steps.tolist()).get(number)
    if number is None or partner is None:
        return None
    steps, limits, modules = (
        number_steps(pair.other),
        replace(limits, spans=0),
        ModuleDifference(pair, number),
    )
    asked = partner if alone is not None else None
    shown = _show_step(pair.other, limits, steps, asked, apart=modules.apart_in_second)
    if shown.number != partner:  # its medians are of another step than those of the first run
        shown = _show_step(pair.other, limits, steps, partner, apart=modules.apart_in_second)
    return _Second(pair.other, shown, modules, JoinedGraphs(pair, graph, shown.graph, number))


def _unite(
    shown: _ShownStep, second: _Second, tables: Mapping[str, ReportTable]
) -> Mapping[str, ReportTable]:
    """Returns the tables of modules, nodes and edges with those of the second run in them, and its numbers beside."""
    data, other = second.data, second.shown
    modules, second_modules, rows = second.modules.unite(
        shown.rows,
        other.rows,
        tables["modules"],
        _tabulate_modules(data, other, read_measured(data), ()),
        second.graphs.find_busy(),
    )
    united = unite_graphs(
        second.graphs,
        shown.cut,
        tables,
        lambda cut: tabulate_nodes(data, other.graph, cut, other.rows.index, ()),
        rows,
    )
    return {"modules": modules, "second_modules": second_modules, **united}


def _choose_series(data: RecordingData, limits: Limits, kept: int | None) -> _ShownSeries:
    measured = read_measured(data)
    every = steps_of(measured)
    binned = thin(every, count_histograms(measured) / max(len(every), 1), limits.histograms, kept)
    return _ShownSeries(measured, every, thin(every, count_cells(measured), limits.values, kept), binned)


def _tabulate_step(
    data: RecordingData, shown: _ShownStep, origins: Origins, measured: list[RoleValues], steps: Column
) -> Mapping[str, ReportTable]:
    graph, cut, index = shown.graph, shown.cut, shown.rows.index
    apart = shown.second.graphs.number_layers() if shown.second is not None else None
    tables = {
        "modules": _tabulate_modules(data, shown, measured, origins[0]),
        "nodes": tabulate_nodes(data, graph, cut, index, origins[1], apart),
        "edges": tabulate_edges(graph, cut),
        "parameters": tabulate_parameters(measured, graph, index),
    }
    if shown.timeline:
        tables["spans"] = tabulate_spans(data, shown.timeline, graph, cut, index, steps, find_start(data))
    return tables


def _tabulate_modules(
    data: RecordingData, shown: _ShownStep, measured: list[RoleValues], origins: Collection[int]
) -> ReportTable:
    ops, memory = build_op_table(data, step=shown.alone), build_memory_table(data, step=shown.alone)
    outputs = _outputs(measured, shown.number)
    return tabulate_modules(shown.rows, ops, memory, outputs, origins, device_times=shown.device_times)


def _tabulate_series(series: _ShownSeries, shown: _ShownStep, steps: Column) -> Mapping[str, ReportTable]:
    histograms, bins = tabulate_histograms(series.measured, steps, series.binned)
    sites = tabulate_sites(series.measured, shown.rows.index)
    values = tabulate_series(series.measured, series.steps)
    sites, values = add_block_gradients(sites, values, shown.rows, len(series.steps))
    step = number_column("step", "step", "step", np.searchsorted(steps, series.steps))
    return {
        "sites": sites,
        "series": values,
        "series_steps": ReportTable(rows=len(series.steps), columns=(step,)),
        "histograms": histograms,
        "bins": bins,
    }


def _describe_missing(
    data: RecordingData, steps: Column, shown: _ShownStep, series: _ShownSeries
) -> Iterator[str]:
    """Yields sentences on what was left out to keep the file small, and on what was not recorded."""
    graph, timeline = shown.graph, shown.timeline
    if shown.sample is not None:
        several = shown.sample.describe()
        yield f"Times, costs and memory of modules are medians of {several}; all else is of step {shown.number}."
    if shown.cut.depth is not None:
        whole = len(graph.layers) + len(graph.nodes)
        level = count_of(shown.cut.depth, "level")
        yield f"The graph has {whole:,} calls and ops. What is deeper than {level} below the root is left out."
    if timeline is None and len(steps):
        yield "The timeline is left out: the step has more calls than there is room for."
    if timeline is not None and len(timeline.steps) < len(steps):
        yield f"The timeline has {count_of(len(timeline.steps), 'step')} of {len(steps):,}, those around the shown one."
    if timeline is not None and has_ops(data) and _OP not in timeline.spans.kind:
        yield "The timeline is without ops: the step has more of them than there is room for."
    every = len(series.every)
    if len(series.steps) < every:
        yield f"Of the values, {len(series.steps):,} of {count_of(every, 'step')} are here, evenly chosen."
    if count_histograms(series.measured) and len(series.binned) < every:
        yield f"Of histograms, {len(series.binned):,} of {count_of(every, 'step')} are here, evenly chosen."
    if explain_empty(data):  # an empty recording has a finding that explains it
        return
    for table in ("ops", "values") if data.table("calls").num_rows else ("calls",):
        if not data.table(table).num_rows:
            why = explain_none(data, table)
            yield why[0].upper() + why[1:]


def _name(command: Sequence[str]) -> str:
    """Returns the command line as the report's name, or "recording" if it names no program."""
    return shlex.join(command) if command and command[0] not in ("", "-c", "-") else "recording"


def _build_timeline(data: RecordingData, steps: Column, most: int, kept: int | None) -> Timeline | None:
    """Returns the timeline of the steps around `kept`, with at most `most` spans; None if there is none."""
    calls, ops = (_count_spans(data, name, steps) for name in ("calls", "ops"))
    for spans, with_ops in ((calls + ops + 1, True), (calls + 1, False)):
        window = choose_window(steps, spans, most, kept)
        if window is not None:
            shown = StepRange(window[0], window[1] + 1)
            return build_timeline(data, steps=shown, ops=with_ops, details=SPAN_DETAILS)
    return None


def _count_spans(data: RecordingData, name: str, steps: Column) -> Column:
    """Returns the number of spans in each step: one for each row, and another for a row with device times."""
    table = data.table(name)
    spans = 1 + (column_of(table, "device_end_ns") >= 0)
    row = np.searchsorted(steps, column_of(table, "step"))
    return np.bincount(row, weights=spans, minlength=len(steps)).astype(np.int64)


def _outputs(measured: list[RoleValues], step: int | None) -> Outputs:
    """Returns the dtype and shape of each module's first output in a step."""
    outputs: dict[Place, tuple[str | None, str | None]] = {}
    for values in measured:
        if values.role != "output":
            continue
        rows = values.cells.single[values.cells.step == step]
        table = values.selected.select("dtype", "shape").take(rows)
        for site, row in zip(values.selected.site[rows].tolist(), table.to_pylist(), strict=True):
            owner = values.selected.owners[site]
            outputs.setdefault((owner.root, owner.path), (row["dtype"], shape_text(row["shape"])))
    return outputs


def _about(data: RecordingData) -> list[tuple[str, str]]:
    meta = data.meta
    texts: Mapping[str, str] = {
        "command": " ".join(meta.argv),
        "recorded": meta.created,
        "device": meta.device,
        "commit": meta.git_commit or "",
        "modtrace": meta.modtrace_version,
        **meta.versions,
    }
    return [(label, text) for label, text in texts.items() if text]
