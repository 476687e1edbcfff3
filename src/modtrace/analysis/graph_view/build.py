"""Makes a view of a graph: the visible boxes, nodes and edges."""

from collections.abc import Iterable, Sequence
from functools import cached_property
from typing import Any

import numpy as np

from ...recording.phase import PHASES
from ...recording.process import collector_paused
from ..graph.columns import (
    EARLIER,
    INPUT,
    LAYER_KINDS,
    NODE_KINDS,
    NONE,
    OP,
    PHASE,
    TENSOR,
    Graph,
    LayerPlace,
    Numbers,
)
from ..graph.costs import sum_at
from ..tables.columns import Column, Rows
from .items import Items, Seen
from .keys import distinct, layer_keys, name_layers, node_keys
from .lift import lift_edges
from .records import LAYER, GraphView, ViewBox, ViewNode

_PHASE, _OP, _INPUT = LAYER_KINDS.index(PHASE), NODE_KINDS.index(OP), NODE_KINDS.index(INPUT)
_IS_NAMED_AS_OP = [kind in (OP, EARLIER) for kind in NODE_KINDS]


@collector_paused()  # making 200,000 tuples of 24 fields takes 1.2 s instead of 2.1 s
def build_view(graph: Graph, seen: Seen) -> GraphView:
    """Returns the visible boxes, nodes and edges of a graph. Edges inside a closed layer are left out."""
    visible = _Visible(graph, seen)
    items = visible.in_order()
    number = np.full(int(items.max(initial=0)) + 1, NONE, np.int64)
    number[items] = np.arange(len(items))
    return GraphView(
        command=graph.command,
        marks=graph.marks,
        step=graph.step,
        has_ops=graph.has_ops,
        boxes=visible.boxes(),
        nodes=visible.nodes(items, number),
        edges=lift_edges(graph, visible.items, visible.order, number),
    )


class _Visible:
    """The visible items of a graph, with the properties that their records need."""

    def __init__(self, graph: Graph, seen: Seen) -> None:
        self._graph = graph
        self.items = items = Items(graph, seen)
        self.order = items.order()
        self._box_rows = self._open_layers()
        self._box_of = self._innermost_boxes()
        self._layer_keys = layer_keys(graph)
        is_op = np.concatenate([[0], np.cumsum(graph.nodes.kind == _OP)])
        inside = is_op[graph.end_node] - is_op[graph.first_node]
        self._layer_ops = np.bincount(items.layer_for, inside, minlength=len(inside)).astype(np.int64)
        self._layer_repeats = np.bincount(items.layer_for, minlength=len(inside))
        self._names, self._labels = name_layers(graph, seen.folding)
        self._layer_numbers = _sum_numbers(graph.layers.numbers, items.layer_for)

    @cached_property
    def _node_keys(self) -> list[str]:
        return node_keys(self._graph, self._layer_keys)

    def in_order(self) -> Rows:
        """Returns the items that are nodes of the view, by time. A tensor follows the op that made it."""
        shown = np.unique(self.items.of_node)
        tensors = np.unique(self.items.tensor_of_edge)
        tensors = tensors[tensors >= 0]
        _, first = np.unique(self.items.tensor_of_edge, return_index=True)
        edge = first[len(first) - len(tensors) :]
        made_by = self.items.of_node[self._graph.edges.source[edge]]
        self._maker = dict(zip(tensors.tolist(), made_by.tolist(), strict=True))
        self._edge = dict(zip(tensors.tolist(), edge.tolist(), strict=True))
        items = np.concatenate([shown, tensors])
        times = np.concatenate([self.order[shown], self.order[made_by]])
        return items[np.lexsort((items, np.arange(len(items)) >= len(shown), times))]

    def _open_layers(self) -> Rows:
        """Returns a mask of the layers that are boxes. A phase is a box only if there are several."""
        layers, items = self._graph.layers, self.items
        is_open = (items.closed_at < 0) & (items.layer_for == np.arange(len(layers)))
        is_open &= self._graph.end_node > self._graph.first_node
        is_phase = layers.kind == _PHASE
        if int((is_open & is_phase).sum()) < 2:
            is_open &= ~is_phase
        return np.flatnonzero(is_open)

    def _innermost_boxes(self) -> Rows:
        """Returns for each layer the number of the innermost box around its contents.

        The last element is NONE and stands for no layer.
        """
        number = np.full(len(self._graph.layers), NONE, np.int64)
        number[self._box_rows] = np.arange(len(self._box_rows))
        found: list[int] = []
        for own, above in zip(number.tolist(), self._graph.layers.parent.tolist(), strict=True):
            found.append(own if own >= 0 else found[above] if above >= 0 else NONE)
        return np.array([*found, NONE], np.int64)

    def boxes(self) -> tuple[ViewBox, ...]:
        layers, rows = self._graph.layers, self._box_rows
        nodes = self._layer_nodes(rows, rows[:0])
        more = zip(layers.kind[rows].tolist(), layers.depth[rows].tolist(), strict=True)
        return tuple(
            ViewBox(**{name: getattr(node, name) for name in _COMMON}, kind=LAYER_KINDS[kind], depth=depth)
            for node, (kind, depth) in zip(nodes, more, strict=True)
        )

    def nodes(self, items: Rows, number: Rows) -> tuple[ViewNode, ...]:
        """Returns the nodes of the view; `number` gives the node number of each item."""
        base, behind = self.items.first_node, self.items.first_tensor
        rows = items.tolist()
        layer_items, node_items = items[items < base], items[(items >= base) & (items < behind)] - base
        layers = iter(self._layer_nodes(layer_items, number))
        nodes = iter(self._own_nodes(node_items, number))
        made: list[ViewNode] = []
        for item in rows:
            if item < base:
                made.append(next(layers))
            elif item < behind:
                made.append(next(nodes))
            else:
                made.append(self._tensor_node(item, made[number[self._maker[item]]]))
        if self._maker:  # outputs of ops such as `_foreach_add_` have no slots
            keys = distinct(node.key for node in made)
            made = [layer._replace(key=key) for layer, key in zip(made, keys, strict=True)]
        return tuple(made)

    def _layer_nodes(self, rows: Rows, number: Rows) -> Iterable[ViewNode]:
        layers = self._graph.layers
        columns = (
            layers.place, layers.nth, layers.phase, self._layer_repeats, self._layer_ops, layers.start_ns,
            layers.raised, layers.compiled,
        )  # fmt: skip
        twin = self.items.of_layer[layers.repeats[rows]]
        known = zip(
            rows.tolist(),
            self._box_of[layers.parent[rows]].tolist(),
            _numbers_of(twin, number),
            *(column[rows].tolist() for column in columns),
            _number_tuples(self._layer_numbers.take(rows)),
            strict=True,
        )
        for row, box, goes_back, at, nth, phase, repeats, ops, start_ns, raised, compiled, numbers in known:
            place = layers.places[at]
            yield ViewNode._make((
                self._layer_keys[row], LAYER, self._names[row], self._labels[row], place.type, place.path, place.root,
                None if nth < 0 else nth, PHASES[phase], box, repeats, ops, None, None, "", start_ns, *numbers,
                raised, compiled, goes_back, row,
            ))  # fmt: skip

    def _own_nodes(self, rows: Rows, number: Rows) -> Iterable[ViewNode]:
        graph, nodes = self._graph, self._graph.nodes
        layers, tensors = graph.layers, graph.tensors
        repeats = np.bincount(self.items.node_for, minlength=len(nodes))
        sums = _sum_numbers(nodes.numbers, self.items.node_for).take(rows)
        keys = self._node_keys
        twin = np.append(self.items.of_node, NONE)[nodes.repeats[rows]]
        places = [*(layers.places[place] for place in layers.place.tolist()), None]
        nth = [*layers.nth.tolist(), NONE]
        compiled = [*layers.compiled.tolist(), False]
        labels = [_shorten(name) for name in nodes.names]
        structures = self.items.structures
        columns = (
            nodes.layer, nodes.kind, nodes.name, nodes.phase, nodes.tensor, nodes.args, nodes.start_ns, nodes.raised
        )  # fmt: skip
        known = zip(
            rows.tolist(),
            self._box_of[nodes.layer[rows]].tolist(),
            _numbers_of(twin, number),
            repeats[rows].tolist(),
            zip(*(column[rows].tolist() for column in columns), strict=True),
            _number_tuples(sums),
            strict=True,
        )
        for row, box, goes_back, count, own, numbers in known:
            layer, kind, name, phase, tensor, args, start_ns, raised = own
            place = places[layer]
            call = nth[layer]
            yield ViewNode._make((
                keys[row], NODE_KINDS[kind], nodes.names[name],
                labels[name] if _IS_NAMED_AS_OP[kind] else _label(kind, structures.get(row, nodes.names[name]), place),
                "", place.path if place else None, place.root if place else None, None if call < 0 else call,
                PHASES[phase] if phase >= 0 else None, box, count, count if kind == _OP else 0,
                tensors.shapes[tensor] if tensor >= 0 else None, tensors.dtypes[tensor] if tensor >= 0 else None,
                nodes.argument_texts[args] if args >= 0 else "", start_ns, *numbers, raised,
                kind == _OP and compiled[layer], goes_back, row,
            ))  # fmt: skip

    def _tensor_node(self, item: int, maker: ViewNode) -> ViewNode:
        edges, tensors = self._graph.edges, self._graph.tensors
        tensor = int(edges.tensor[self._edge[item]])
        slot = tensors.slots[int(tensors.slot[tensor])] if tensors.slot[tensor] >= 0 else ""
        name = slot or "tensor"
        producer = int(self.items.node_for[tensors.producer[tensor]])
        return maker._replace(
            key=f"{self._node_keys[producer]}:{name}", kind=TENSOR, name=name, label=name, type="", ops=0,
            shape=tensors.shapes[tensor], dtype=tensors.dtypes[tensor], args="", duration_ns=0, flops=0, bytes_read=0,
            bytes_written=0, saved_bytes=0, nonfinite=None, rms=None, twin=NONE, first=tensor,
        )  # fmt: skip


#: The fields that a box shares with the node of a closed layer.
_COMMON = [field for field in ViewBox._fields if field in ViewNode._fields and field != "kind"]


def _numbers_of(items: Rows, number: Rows) -> list[int]:
    """Returns the node number of each item; NONE for an item that is not visible."""
    known = (items >= 0) & (items < len(number))
    found: list[int] = np.where(known, np.append(number, NONE)[np.where(known, items, -1)], NONE).tolist()
    return found


def _label(kind: int, name: str, place: LayerPlace | None) -> str:
    """Returns the label of a leaf or output, such as `input[0]`; for a parameter, its path below its module."""
    if kind == _INPUT:
        return f"input{name}"
    return name.removeprefix(f"{place.path}.") if place and place.path else name


def _shorten(name: str) -> str:
    """Returns a short name: `addmm` for `aten.addmm.default`, and the last part of a path."""
    parts = name.split(".")
    return parts[1] if len(parts) == 3 else parts[-1]


def _sum_numbers(numbers: Numbers, onto: Rows) -> Numbers:
    """Returns the sums over all rows that each item represents; -1 if one of them is not known."""
    if np.array_equal(onto, np.arange(len(onto))):
        return numbers
    sums: dict[str, Column] = {}
    count = np.bincount(onto, minlength=len(onto))
    for name, column in vars(numbers).items():
        total = sum_at(onto, np.maximum(column, 0), len(onto))
        unknown = sum_at(onto, column < 0, len(onto))
        is_measure = name in ("nonfinite", "measured", "sumsq")
        missing = unknown == count if is_measure else unknown > 0
        sums[name] = np.where(missing, NONE, total).astype(column.dtype)
    return Numbers(**sums)


def _number_tuples(numbers: Numbers) -> Iterable[tuple[Any, ...]]:
    """Returns for each row its time, flops, bytes read, written and saved, non-finite elements and root mean square."""
    counted = [
        numbers.flops,
        numbers.bytes_read,
        numbers.bytes_written,
        numbers.saved_bytes,
        numbers.nonfinite,
    ]
    has_mean = numbers.measured > 0
    mean = np.where(has_mean, numbers.sumsq, 0) / np.where(has_mean, numbers.measured, 1)
    rms: Sequence[float | None] = [
        root if has else None for root, has in zip(np.sqrt(mean).tolist(), has_mean.tolist(), strict=True)
    ]
    known = ([None if value < 0 else value for value in column.tolist()] for column in counted)
    return zip(numbers.duration_ns.tolist(), *known, rms, strict=True)
