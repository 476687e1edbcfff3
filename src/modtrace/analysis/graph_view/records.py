"""Records of the visible part of a graph: boxes, nodes and edges."""

from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from ..tables.chosen_step import ShownStep

#: The kind of a node that is a closed layer; the others are in `graph.NODE_KINDS`.
LAYER = "layer"


class ViewNode(NamedTuple):
    """A visible node: an op, a leaf, an output, a tensor, or a closed layer."""

    key: str  # the same in every step and run: phase, path, call, op, occurrence
    kind: str
    name: str  # path of a layer, of a root its name; name of an op; path of a parameter
    label: str  # the short name: `attn`, `addmm`, `weight`
    type: str  # class of a layer; else ""
    path: str | None  # of the module that it is, or is in; None: it is in none
    root: str | None
    call: int | None  # n-th of that module in the step, from 0
    phase: str | None
    box: int  # the box around it; -1 for none
    repeats: int  # layers, or ops of folded layers, that it stands for
    ops: int  # inside; 1 for an op
    shape: tuple[int, ...] | None  # of a leaf or tensor, of the first that an op returns; None: not known
    dtype: str | None
    args: str  # JSON template of an op's arguments
    start_ns: int
    duration_ns: int  # sum over what it stands for, as what follows
    flops: int | None  # None, here and below: not known
    bytes_read: int | None
    bytes_written: int | None
    saved_bytes: int | None
    nonfinite: int | None  # NaN and infinite elements; None: it was not measured
    rms: float | None  # of the outputs that were measured
    raised: bool
    compiled: bool  # it ran as compiled code, or inside of it
    twin: int  # the visible node that it goes back to (backward) or repeats (recompute); -1 for none
    first: int  # what it stands for, and stands for it: row of `Graph.layers` or `Graph.nodes`


class ViewBox(NamedTuple):
    """An open layer: a box around nodes and other boxes."""

    key: str
    kind: str  # of LAYER_KINDS
    name: str
    label: str
    type: str
    path: str | None
    root: str | None
    call: int | None
    phase: str
    box: int  # the box around it; -1 for none
    depth: int
    repeats: int
    ops: int
    start_ns: int
    duration_ns: int
    flops: int | None
    bytes_read: int | None
    bytes_written: int | None
    saved_bytes: int | None
    nonfinite: int | None
    rms: float | None
    raised: bool
    compiled: bool
    first: int


class ViewEdge(NamedTuple):
    """An edge from the node that made a tensor, or that is the tensor, to a node that reads it."""

    source: int
    target: int
    kind: str  # DATA or NEXT
    slot: str  # the argument of the target, of the first of `reads`
    shape: tuple[int, ...] | None
    dtype: str | None
    reads: int  # edges of the graph that it stands for
    time_ns: int  # when the target first read it
    #: Leads back in its phase: from one folded layer to the next, or into a container a second time.
    is_loop: bool
    output: str = ""  # which of several things that the source returns


@dataclass(frozen=True)
class GraphView:
    """The visible part of a graph: boxes, outer ones first; nodes and edges in order of time."""

    command: tuple[str, ...]
    marks: tuple[str, ...]
    step: ShownStep | None
    has_ops: bool
    boxes: tuple[ViewBox, ...]
    nodes: tuple[ViewNode, ...]
    edges: tuple[ViewEdge, ...]

    @cached_property
    def phases(self) -> tuple[str, ...]:
        """The phases of the visible items, in the order in which they began."""
        return tuple(dict.fromkeys(node.phase for node in self.nodes if node.phase))
