"""The execution graph of one step as columns: layers, the nodes in them, and the edges between nodes."""

from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from ..tables.chosen_step import ShownStep
from ..tables.columns import Column, Rows, columns_at
from ..tables.tensors import Tensors

#: No layer, no node.
NONE = -1

# Kinds of nodes.
OP = "op"
CALL = "call"  # of a module that calls none, where no ops were recorded
INPUT = "input"
PARAMETER = "parameter"
BUFFER = "buffer"
CONSTANT = "constant"  # no op has made it, and it does not belong to the model
EARLIER = "earlier"  # made by an op that is not in the graph: in an earlier step, or left out
TENSOR = "tensor"  # made by an op of the graph; only in views that show tensors
OUTPUT = "output"
NODE_KINDS = (OP, CALL, INPUT, PARAMETER, BUFFER, CONSTANT, EARLIER, TENSOR, OUTPUT)
LEAF_KINDS = (INPUT, PARAMETER, BUFFER, CONSTANT, EARLIER)

# Kinds of layers.
PHASE = "phase"
MODULE = "module"  # one call of a module
CONTAINER = "container"  # a module that holds others and is not called: ModuleList
OPTIMIZER_STEP = "optimizer"
LAYER_KINDS = (PHASE, MODULE, CONTAINER, OPTIMIZER_STEP)

# Kinds of edges.
DATA = "data"  # the target reads what the source has made, or is
NEXT = "next"  # the target is the call that began next; only if no ops were recorded


@dataclass(frozen=True, kw_only=True, eq=False)
class Numbers:
    """The costs and contents of nodes or layers; -1 where they are not known."""

    duration_ns: Column
    flops: Column
    bytes_read: Column
    bytes_written: Column
    saved_bytes: Column
    nonfinite: Column  # NaN and infinite elements of what was measured; -1: nothing was
    infinite: Column  # of those the infinite ones
    measured: Column  # finite or not: elements that `sumsq` is of
    sumsq: Column  # float64

    def take(self, rows: Rows) -> "Numbers":
        """Returns the numbers of some rows."""
        return Numbers(**columns_at(self, rows))


@dataclass(frozen=True, kw_only=True, eq=False)
class LayerBoxes:
    """Boxes around nodes, in pre-order. The layers inside a layer follow it, up to `last`."""

    parent: Rows  # NONE for those in no other
    last: Rows
    depth: Column  # 0 for a root, 1 for what is registered in it, and so on; -1 for a phase
    kind: Column  # codes of LAYER_KINDS
    phase: Column  # codes of PHASES
    place: Column  # number in `places`
    start_ns: Column
    places: tuple["LayerPlace", ...]


@dataclass(frozen=True, kw_only=True, eq=False)
class Layers(LayerBoxes):
    """The layers of a graph, and what is known of each."""

    nth: Column  # n-th call of the module in the step, from 0; -1: not known, or no call
    call_id: Column  # NONE where it is no call
    repeats: Rows  # the layer of the forward call that this backward or recompute belongs to
    raised: Column
    compiled: Column  # it ran as compiled code, or is inside of what did
    numbers: Numbers

    def __len__(self) -> int:
        return len(self.parent)


@dataclass(frozen=True)
class LayerPlace:
    """The names of layers that are calls of one module at one place, or not calls."""

    name: str  # path, of a root its name; the name of a phase
    label: str  # the part of the path below the layer around it
    path: str | None = None
    root: str | None = None
    type: str = ""


@dataclass(frozen=True, kw_only=True, eq=False)
class NodeColumns:
    """What is known of nodes, in any order."""

    layer: Rows  # NONE: in no layer
    kind: Column  # codes of NODE_KINDS
    name: Column  # codes of `names`
    nth: Column  # of its name within the call, from 0; of an output of its call
    phase: Column  # codes of PHASES; -1 for none
    op_id: Column  # NONE where it is no op
    tensor: Rows  # row of `Graph.tensors` of a leaf, or of the first thing that an op returns; NONE for none
    args: Column  # codes of `argument_texts`
    is_view: Column  # an op that returned views of what it read
    repeats: Rows  # the op that a backward op goes back to, or that a recomputed op repeats
    start_ns: Column
    raised: Column
    numbers: Numbers
    names: tuple[str, ...]
    argument_texts: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True, eq=False)
class Nodes(NodeColumns):
    """Nodes; those of one layer are adjacent.

    They are in the order of `Layers`, and within a layer in order of time.
    """

    order: Rows  # rank in time
    root: Column  # codes of `roots`: of a leaf or an output, where the recording has several roots; -1: no matter
    roots: tuple[str, ...]

    def take(self, rows: Rows) -> "Nodes":
        """Returns some of the nodes; `repeats` still refers to rows of all nodes."""
        return replace(self, **columns_at(self, rows), numbers=self.numbers.take(rows))

    def __len__(self) -> int:
        return len(self.layer)


@dataclass(frozen=True, kw_only=True, eq=False)
class Edges:
    """Edges from producers to readers of tensors, in order of time."""

    source: Rows
    target: Rows
    tensor: Rows  # row of `Graph.tensors`; NONE for edges that are NEXT
    slot: Column  # codes of `slots`: the argument of the target
    time_ns: Column  # when the target began
    slots: tuple[str, ...]

    def __len__(self) -> int:
        return len(self.source)

    def take(self, rows: Rows) -> "Edges":
        """Returns some of the edges."""
        return replace(self, **columns_at(self, rows))


@dataclass(frozen=True, kw_only=True, eq=False)
class Graph:
    """The execution graph of one step, or of a part of it."""

    command: tuple[str, ...]
    marks: tuple[str, ...]
    step: ShownStep | None  # None: nothing was recorded
    has_ops: bool  # False: the step has none; nodes are calls, and edges say what ran next
    layers: Layers
    nodes: Nodes
    edges: Edges
    tensors: Tensors
    device_times: bool = False  # durations are times of devices

    @cached_property
    def first_node(self) -> Rows:
        """The first node inside each layer or the layers in it."""
        return np.searchsorted(self.nodes.layer, np.arange(len(self.layers)), side="left")

    @cached_property
    def end_node(self) -> Rows:
        """The number of the last node inside each layer, plus one."""
        return np.searchsorted(self.nodes.layer, self.layers.last, side="right")
