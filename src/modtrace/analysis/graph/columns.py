"""The execution graph of one step as columns: layers, the nodes in them, and the edges between nodes."""

from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from ..tables.chosen_step import ShownStep
from ..tables.columns import Column, Rows, columns_at
from ..tables.tensors import Tensors

#: The number that stands for no layer and for no node.
NONE = -1

# The kinds of nodes.
OP = "op"
CALL = "call"  # a call of a module that calls no other, where no ops were recorded
INPUT = "input"
PARAMETER = "parameter"
BUFFER = "buffer"
CONSTANT = "constant"  # a leaf that no op made, and that does not belong to the model
EARLIER = "earlier"  # a leaf that an op outside of the graph made: in an earlier step, or left out
TENSOR = "tensor"  # the output of an op of the graph; only in views that show tensors
OUTPUT = "output"
NODE_KINDS = (OP, CALL, INPUT, PARAMETER, BUFFER, CONSTANT, EARLIER, TENSOR, OUTPUT)
LEAF_KINDS = (INPUT, PARAMETER, BUFFER, CONSTANT, EARLIER)

# The kinds of layers.
PHASE = "phase"
MODULE = "module"  # one call of a module
CONTAINER = "container"  # a module such as ModuleList that holds others and is not called
OPTIMIZER_STEP = "optimizer"
LAYER_KINDS = (PHASE, MODULE, CONTAINER, OPTIMIZER_STEP)

# The kinds of edges.
DATA = "data"  # the target reads the tensor that the source made or is
NEXT = "next"  # the target is the call that began next; only if no ops were recorded


@dataclass(frozen=True, kw_only=True, eq=False)
class Numbers:
    """The costs and contents of nodes or layers; -1 where they are not known."""

    duration_ns: Column
    flops: Column
    bytes_read: Column
    bytes_written: Column
    saved_bytes: Column
    nonfinite: Column  # the number of NaN and infinite elements; -1 if nothing was measured
    infinite: Column  # how many of these are infinite
    measured: Column  # the number of measured elements that `sumsq` sums
    sumsq: Column  # the sum of squares, as float64

    def take(self, rows: Rows) -> "Numbers":
        """Returns a selection of the rows."""
        return Numbers(**columns_at(self, rows))


@dataclass(frozen=True, kw_only=True, eq=False)
class LayerBoxes:
    """Boxes around nodes, in pre-order: the layers inside a layer have the numbers after its own, up to its `last`."""

    parent: Rows  # the number of the enclosing layer; NONE for none
    last: Rows
    depth: Column  # 0 for a root, 1 for modules registered in it, and so on; -1 for a phase
    kind: Column  # codes of LAYER_KINDS
    phase: Column  # codes of PHASES
    place: Column  # indices of `places`
    start_ns: Column
    places: tuple["LayerPlace", ...]


@dataclass(frozen=True, kw_only=True, eq=False)
class Layers(LayerBoxes):
    """The layers of a graph, with all columns that a view may show."""

    nth: Column  # the number of the call among those of its module in the step; -1 if unknown or no call
    call_id: Column  # NONE for a layer that is no call
    repeats: Rows  # the layer of the forward call to which this backward or recompute belongs
    raised: Column
    compiled: Column  # whether the layer ran as compiled code, or inside of such a layer
    numbers: Numbers

    def __len__(self) -> int:
        return len(self.parent)


@dataclass(frozen=True)
class LayerPlace:
    """The names of layers at one place: calls of a module, a container, or a phase."""

    name: str  # the path of the module, the name of a root or of a phase
    label: str  # the part of the path below the enclosing layer
    path: str | None = None
    root: str | None = None
    type: str = ""


@dataclass(frozen=True, kw_only=True, eq=False)
class NodeColumns:
    """The columns of nodes in any order."""

    layer: Rows  # the number of the layer; NONE for none
    kind: Column  # codes of NODE_KINDS
    name: Column  # codes of `names`
    nth: Column  # number among the ops of its name, or among the outputs, of the call
    phase: Column  # codes of PHASES; -1 for none
    op_id: Column  # NONE for a node that is no op
    tensor: Rows  # row of `Graph.tensors` of a leaf or of an op's first output; NONE for none
    args: Column  # codes of `argument_texts`
    is_view: Column  # whether the op only returns views of what it reads
    repeats: Rows  # the forward op of a backward op, or the op that a recomputed op repeats
    start_ns: Column
    raised: Column
    numbers: Numbers
    names: tuple[str, ...]
    argument_texts: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True, eq=False)
class Nodes(NodeColumns):
    """Nodes, where the nodes of one layer are adjacent.

    Layers are in the order of `Layers`, and the nodes in a layer in order of time.
    """

    order: Rows  # the rank of each node in time
    root: Column  # codes of `roots` for leaves and outputs, if there are several roots; else -1
    roots: tuple[str, ...]

    def take(self, rows: Rows) -> "Nodes":
        """Returns a selection of the nodes; their `repeats` still refer to rows of all nodes."""
        return replace(self, **columns_at(self, rows), numbers=self.numbers.take(rows))

    def __len__(self) -> int:
        return len(self.layer)


@dataclass(frozen=True, kw_only=True, eq=False)
class Edges:
    """Edges from the producers of tensors to their readers, in order of time."""

    source: Rows
    target: Rows
    tensor: Rows  # row of `Graph.tensors`; NONE for edges of kind NEXT
    slot: Column  # the argument of the target, as a code of `slots`
    slots: tuple[str, ...]

    def __len__(self) -> int:
        return len(self.source)

    def take(self, rows: Rows) -> "Edges":
        """Returns a selection of the edges."""
        return replace(self, **columns_at(self, rows))


@dataclass(frozen=True, kw_only=True, eq=False)
class Graph:
    """The execution graph of one step, or of a part of it."""

    command: tuple[str, ...]
    marks: tuple[str, ...]
    step: ShownStep | None  # None if nothing was recorded
    has_ops: bool  # False if the step has no ops, so that nodes are calls and edges say what ran next
    layers: Layers
    nodes: Nodes
    edges: Edges
    tensors: Tensors
    device_times: bool = False  # whether durations are device times

    @cached_property
    def first_node(self) -> Rows:
        """The first node inside each layer, at any depth."""
        return np.searchsorted(self.nodes.layer, np.arange(len(self.layers)), side="left")

    @cached_property
    def end_node(self) -> Rows:
        """The last node inside each layer, plus one."""
        return np.searchsorted(self.nodes.layer, self.layers.last, side="right")
