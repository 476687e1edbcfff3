"""Builds the tables of a graph: its layers, the ops and tensors in them, and the edges between these."""

import math
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from ...recording.phase import PHASES
from ...recording.protocols import RecordingData
from ..graph.columns import BUFFER, DATA, INPUT, LAYER_KINDS, NEXT, NODE_KINDS, OP, PARAMETER, Graph, Numbers
from ..graph.parts import forms_of_op
from ..graph_view.fold import fold_graph
from ..tables.calls import iterate_levels
from ..tables.columns import Column, RowFinder, Rows, column_of, columns_at, dictionary_codes, take
from ..tables.inside import with_inside
from ..tables.tensors import Tensors, shape_text
from .limits import GraphCut
from .modules import Place
from .tables import (
    NONE,
    ReportColumn,
    ReportTable,
    coded_column,
    narrow,
    number_codes,
    number_column,
    seconds,
    text_column,
)

#: A column of codes, and the texts that they stand for.
_Texts = tuple[Column, Sequence[str]]


def tabulate_nodes(
    data: RecordingData,
    graph: Graph,
    cut: GraphCut,
    index: Mapping[Place, int],
    origins: Collection[int],
    apart: Column | None = None,
) -> ReportTable:
    """Returns the table of shown layers in pre-order, followed by the shown nodes.

    Args:
        data: the recording.
        graph: the graph of the step.
        cut: the selection of rows that are shown.
        index: the row of each module.
        origins: the shown rows in which NaN or infinite values came up.
        apart: as for `sign_layers`.
    """
    whole, shown_layers = graph, cut.shown[cut.shown < len(graph.layers)]
    graph = _take(graph, shown_layers, cut.shown[len(shown_layers) :] - len(graph.layers))
    layers, nodes, size = graph.layers, graph.nodes, len(graph.layers)
    places = [index.get((place.root, place.path), NONE) for place in layers.places]
    module = np.array([*places, NONE], np.int64)
    dtypes = _of_tensors(graph, graph.tensors.dtype)
    no_texts: _Texts = (np.full(len(nodes), NONE), ())

    def of_places(name: str) -> _Texts:
        return layers.place, [getattr(place, name) for place in layers.places]

    def shown(*rows: Column) -> Column:
        return cut.renumber(np.concatenate(rows))  # of a hidden row, the layer around it

    columns = [
        _coded("kind", "kind", (layers.kind, LAYER_KINDS), (nodes.kind, NODE_KINDS)),
        _coded("label", "label", of_places("label"), _label_nodes(graph)),
        _coded("name", "name", of_places("name"), (nodes.name, nodes.names)),
        _coded("type", "type", of_places("type"), no_texts),
        number_column("parent", "inside of", "node", shown(layers.parent, nodes.layer)),
        number_column(
            "module", "module", "module", module[layers.place], module[take(whole.layers.place, nodes.layer)]
        ),
        _coded("phase", "phase", (layers.phase, PHASES), (nodes.phase, PHASES), kind="phase", default=True),
        number_column("call", "call", "count", layers.nth, nodes.nth, about="The n-th in the step, from 0."),
        number_column("order", "order", "count", first_orders(whole)[shown_layers], nodes.order),
        number_column(
            "twin", "goes back to", "node", shown(layers.repeats, _shift(nodes.repeats, len(whole.layers)))
        ),
        *_folded(whole, cut, apart),
        *_numbers(layers.numbers, nodes.numbers, "device time" if graph.device_times else "time"),
        number_column("start", "start", "seconds", *_starts(graph)),
        text_column("shape", "shape", _of_tensors(graph, _code_shapes(graph.tensors))),
        text_column("dtype", "dtype", dtypes, kind="dtype", overlay=True, measure="dtype"),
        _coded("args", "arguments", (np.full(size, NONE), ()), (nodes.args, nodes.argument_texts)),
        *_sources_and_kernels(data, graph),
        _flag("raised", "raised", layers.raised, nodes.raised),
        _flag("is_view", "view", np.zeros(size, bool), nodes.is_view),
    ]
    if layers.compiled.any():
        of_ops = (nodes.kind == NODE_KINDS.index(OP)) & np.append(whole.layers.compiled, False)[nodes.layer]
        columns.append(_flag("compiled", "compiled", layers.compiled, of_ops))
    if origins:
        came_up = np.isin(np.arange(len(cut.shown)), list(origins))
        columns.append(_flag("origin", "NaN or inf came up here", came_up))
    return ReportTable(rows=len(cut.shown), columns=tuple(columns))


def _take(graph: Graph, layers: Rows, nodes: Rows) -> Graph:
    """Returns the graph with some layers and nodes, which still refer to rows of the whole graph."""
    columns = columns_at(graph.layers, layers) | {"numbers": graph.layers.numbers.take(layers)}
    return replace(graph, layers=replace(graph.layers, **columns), nodes=graph.nodes.take(nodes))


def _shift(rows: Column, size: int) -> Column:
    """Returns row numbers of nodes as rows of the table, in which `size` layers come first."""
    return np.where(rows >= 0, rows + size, NONE)


def _flag(name: str, label: str, *parts: Column) -> ReportColumn:
    return number_column(name, label, "flag", *(part.astype(np.uint8) for part in parts), aggregate="any")


def _coded(name: str, label: str, *parts: _Texts, **more: Any) -> ReportColumn:
    """Joins columns of codes with different dictionaries into one column."""
    known: dict[str, int] = {}
    codes = [
        np.array([*(known.setdefault(text, len(known)) for text in texts), NONE], np.int64)[column]
        for column, texts in parts
    ]
    return coded_column(name, label, np.concatenate(codes), tuple(known), **more)


def _label_nodes(graph: Graph) -> _Texts:
    """Returns short names of nodes: `addmm`, `weight`, `input[0]`."""
    nodes = graph.nodes
    distinct, code = np.unique(
        nodes.kind.astype(np.int64) * len(nodes.names) + nodes.name, return_inverse=True
    )
    pairs = (divmod(pair, len(nodes.names)) for pair in distinct.tolist())
    return code, [_shorten(NODE_KINDS[kind], nodes.names[name]) for kind, name in pairs]


def _shorten(kind: str, name: str) -> str:
    if kind == INPUT:
        return f"input{name}"
    if kind in (PARAMETER, BUFFER):
        return name.rpartition(".")[2]
    return forms_of_op(name)[-1] if name.startswith("aten.") else name


def _of_tensors(graph: Graph, texts: _Texts) -> list[str | None]:
    """Returns for each layer None, and for each node the text of its tensor."""
    known = (*texts[1], None)
    of_nodes = (known[code] for code in take(texts[0], graph.nodes.tensor).tolist())
    return [*[None] * len(graph.layers), *of_nodes]


def _code_shapes(tensors: Tensors) -> _Texts:
    codes, shapes = tensors.shape
    return codes, [shape_text(shape) for shape in shapes]


def first_orders(graph: Graph) -> Column:
    """Returns the rank in time of the first node inside each layer."""
    order = graph.nodes.order
    first = np.full(len(graph.layers), len(order), np.int64)
    inside = graph.nodes.layer >= 0
    np.minimum.at(first, graph.nodes.layer[inside], order[inside])
    for level in reversed(list(iterate_levels(graph.layers.parent))[1:]):
        np.minimum.at(first, graph.layers.parent[level], first[level])
    return first


def _folded(graph: Graph, cut: GraphCut, apart: Column | None) -> tuple[ReportColumn, ReportColumn]:
    folding, size = fold_graph(graph, depth=cut.depth, apart=apart), len(graph.layers)
    stands_for = np.concatenate([folding.layer, folding.node + size])
    rows = np.arange(len(stands_for))
    folded = np.where(stands_for == rows, NONE, stands_for)
    count = np.bincount(stands_for, minlength=len(rows))
    return (
        number_column("folded", "shown as", "node", cut.renumber(folded[cut.shown])),
        number_column("count", "stands for", "count", count[cut.shown]),
    )


def _numbers(layers: Numbers, nodes: Numbers, time_label: str) -> list[ReportColumn]:
    def joined(name: str) -> Column:
        return np.concatenate([getattr(layers, name), getattr(nodes, name)])

    measured, sumsq, took_ns = joined("measured"), joined("sumsq"), joined("duration_ns")
    with np.errstate(all="ignore"):
        rms = np.where(measured > 0, np.sqrt(sumsq / np.maximum(measured, 1)), np.nan)
    summed: dict[str, Any] = {"overlay": True, "aggregate": "sum"}
    time, saved = seconds(np.where(took_ns, took_ns, NONE)), joined("saved_bytes")
    return [
        number_column("time", time_label, "seconds", time, measure="time", **summed),
        number_column("FLOPs", "FLOPs", "flops", joined("flops"), measure="FLOPs", **summed),
        number_column("bytes_read", "read", "bytes", joined("bytes_read"), measure="read", **summed),
        number_column(
            "bytes_written", "written", "bytes", joined("bytes_written"), measure="written", **summed
        ),
        number_column("saved", "saved for backward", "bytes", saved, measure="saved", **summed),
        number_column("nonfinite", "non-finite", "count", joined("nonfinite"), measure="nonfinite", **summed),
        number_column("infinite", "infinite", "count", joined("infinite"), aggregate="sum"),
        number_column(
            "RMS", "RMS of output", "number", narrow(rms), measure="RMS", overlay=True, aggregate="max"
        ),
    ]


def _starts(graph: Graph) -> tuple[Column, Column]:
    """Returns the start of layers and nodes, counted from the start of the step."""
    starts = np.concatenate([graph.layers.start_ns, graph.nodes.start_ns])
    known = graph.step.start_ns if graph.step else None
    zero = known if known is not None else int(starts.min(initial=0))
    return narrow((graph.layers.start_ns - zero) / 1e9), narrow((graph.nodes.start_ns - zero) / 1e9)


def _sources_and_kernels(data: RecordingData, graph: Graph) -> Iterator[ReportColumn]:
    """Yields the source line of each op (for backward, of its forward op) and its kernels, where they are known."""
    if graph.step is not None:
        data = with_inside(data, graph.step.step)
    ops = data.table("ops").select(["op_id", "source", "kernel", "forward_op_id"])
    find = RowFinder(column_of(ops, "op_id"))
    row = find(graph.nodes.op_id)
    forward = np.append(find(column_of(ops, "forward_op_id")), NONE)
    for name in ("source", "kernel"):
        codes, texts = dictionary_codes(ops[name])
        if texts:
            codes = np.append(codes, NONE)
            of_ops = codes[row]
            if name == "source":
                of_ops = np.where(of_ops >= 0, of_ops, codes[forward[row]])
            yield coded_column(name, name, np.append(np.full(len(graph.layers), NONE), of_ops), texts)


def tabulate_edges(graph: Graph, cut: GraphCut) -> ReportTable:
    """Returns the edges between shown rows; edges of hidden rows with the same shown ends become one."""
    edges, tensors, size = graph.edges, graph.tensors, len(graph.layers)
    source, target = cut.renumber(edges.source + size), cut.renumber(edges.target + size)
    rows = np.arange(len(edges))
    if cut.depth is not None:
        outside = np.flatnonzero(source != target)
        ends = source[outside] * len(cut.shown) + target[outside]
        rows = outside[np.sort(np.unique(ends, return_index=True)[1])]
    tensor = edges.tensor[rows]
    shapes, shape_texts = number_codes(*_code_shapes(tensors))
    dtypes, dtype_texts = number_codes(*tensors.dtype)
    shape, dtype = (np.append(codes, NONE)[tensor] for codes in (shapes, dtypes))
    bits = np.array([*map(_count_bits, dtype_texts), np.nan])[dtypes]
    sizes = np.append(tensors.numel * bits / 8, np.nan)[tensor]
    return ReportTable(
        rows=len(rows),
        columns=(
            number_column("source", "from", "node", source[rows]),
            number_column("target", "to", "node", target[rows]),
            coded_column("kind", "kind", np.where(tensor >= 0, 0, 1), (DATA, NEXT)),
            coded_column("slot", "argument", edges.slot[rows], edges.slots),
            coded_column("shape", "shape", shape, shape_texts),
            coded_column("dtype", "dtype", dtype, dtype_texts, kind="dtype"),
            number_column("bytes", "bytes", "bytes", sizes, aggregate="sum"),
        ),
    )


def _count_bits(dtype: str) -> float:
    """Returns the bits of an element: 32 for `float32`, 8 for `float8_e4m3fn` and `bool`; NaN if not known."""
    digits = re.search(r"\d+", "8" if dtype == "bool" else dtype)
    return int(digits[0]) if digits else math.nan
