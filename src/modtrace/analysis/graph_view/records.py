"""Defines the records of a graph's visible part: boxes, nodes and edges."""

from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from ..tables.chosen_step import ShownStep

#: The kind of node that is a closed layer; all other kinds are in `graph.NODE_KINDS`.
LAYER = "layer"


class ViewNode(NamedTuple):
    """A visible node: an op, a leaf, an output, a tensor, or a closed layer."""

    key: str  # made of phase, path, call, op and number; equal in every step and run
    kind: str
    name: str  # path of a layer or parameter, name of a root or op
    label: str  # the short name: `attn`, `addmm`, `weight`
    type: str  # class of a layer's module; else ""
    path: str | None  # path of the layer's module, or of the module around; None outside of modules
    root: str | None
    call: int | None  # the number of the call among those of its module in the step, from 0
    phase: str | None
    box: int  # index of the box around it; -1 for none
    repeats: int  # the number of folded layers, or of their ops, that are shown as this node
    ops: int  # the number of ops inside; 1 for an op
    shape: tuple[int, ...] | None  # the shape of a leaf, a tensor, or an op's first output
    dtype: str | None
    args: str  # JSON template of an op's arguments
    start_ns: int
    duration_ns: int  # summed over everything that the node stands for, as are the following numbers
    flops: int | None  # None, as in the following fields, if not known
    bytes_read: int | None
    bytes_written: int | None
    saved_bytes: int | None
    nonfinite: int | None  # the number of NaN and infinite elements; None if not measured
    rms: float | None  # root mean square of the measured outputs
    raised: bool
    compiled: bool  # whether it ran as compiled code, or inside of such code
    twin: int  # index of the node that it goes back to (backward) or repeats (recompute); -1 for none
    first: int  # the first row of `Graph.layers` or `Graph.nodes` that it stands for


class ViewBox(NamedTuple):
    """A visible open layer, shown as a box around nodes and other boxes."""

    key: str
    kind: str  # one of LAYER_KINDS
    name: str
    label: str
    type: str
    path: str | None
    root: str | None
    call: int | None
    phase: str
    box: int  # index of the box around it; -1 for none
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
    """A visible edge, from the node that made or is a tensor to a node that reads it."""

    source: int
    target: int
    kind: str  # DATA or NEXT
    slot: str  # the argument of the target in the first of the `reads`
    shape: tuple[int, ...] | None
    dtype: str | None
    reads: int  # the number of edges of the graph that it stands for
    time_ns: int  # the time at which the target first read
    #: Whether it leads backwards within its phase: between folded layers, or into a container a second time.
    is_loop: bool
    output: str = ""  # names the output, if the source returns several tensors


@dataclass(frozen=True)
class GraphView:
    """The visible part of a graph. Boxes are listed after the boxes around them, nodes and edges in order of time."""

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
