"""Defines hooks on the tensors of calls: a step's end removes them, a later backward registers them again."""

import weakref
from collections.abc import Callable, Iterator
from typing import Any

import torch

from ...measure.measurers.measurer import Measurement
from ...torch_internals.autograd import graph_task_id
from ...torch_internals.dynamo import is_dynamo_compiling
from ...torch_internals.tensors import GradientHook, add_hook, output_nr_of
from ..backward.graph_walk import edges_to_written_bases, node_of, root_nodes, walk_graph
from ..log.segments import Segment
from .capture_masks import ROLE_BITS, Mask


class GradientTap(GradientHook):
    """A hook on a tensor, with the sites under which its gradient is stored.

    While the segment runs, the tap also shows whether a tensor was already measured. The hook is removed when the step
    has ended, but the graph keeps the tap, so a later backward can register the hook again.
    """

    __slots__ = (
        "event", "mark", "more", "output", "output_nr", "path", "ref", "segment", "slot", "task", "version",
    )  # fmt: skip

    output_nr: int

    def __init__(self, segment: Segment, measure: "Callable[[GradientTap, Any], None]") -> None:
        self.receive, self.handle = measure, None  # as the base class does, but faster
        self.segment = segment
        #: The event of the site: the exit of the call that first returned the tensor, or the entry of one that took it.
        self.event = -1
        self.slot = ""
        self.mark = 0  # the gradient's role at the site and the captures that want it; see `mark_of`
        #: The sites of further calls that returned the tensor or took it.
        self.more: list[tuple[int, str, int]] | None = None
        self.path = ""  # the name under which whole tensors of the first site are kept
        self.output: Measurement | None = None  # the measurement of the tensor itself, if a capture wants it
        self.ref: weakref.ref[torch.Tensor] | None = None
        self.version: int | None = None
        self.task = -1  # the graph task in which the last gradient came

    def is_of(self, tensor: torch.Tensor, version: int | None) -> bool:
        """Returns whether the tap is on this tensor, and the tensor was not written to since."""
        return (
            version is not None and self.version == version and self.ref is not None and self.ref() is tensor
        )

    def add_site(self, event: int, slot: str, mark: int) -> None:
        """Adds the site of another call that returned the same tensor, or took it."""
        if self.more is None:
            self.more = []
        self.more.append((event, slot, mark))

    def sites(self) -> Iterator[tuple[int, str, int]]:
        """Yields event, slot and mark of each site, outermost call first."""
        yield from reversed(self.more or ())
        yield self.event, self.slot, self.mark

    @property
    def mask(self) -> Mask:
        """The captures that ask for the gradient, as bits."""
        mask = self.mark >> ROLE_BITS
        for _, _, mark in self.more or ():
            mask |= mark >> ROLE_BITS
        return mask

    def hook(self, tensor: torch.Tensor) -> None:
        """Registers the hook, so that it receives the gradient of the tensor from now on."""
        self.handle = add_hook(tensor, self)
        node = node_of(tensor)
        if node is not None:
            self.output_nr = output_nr_of(tensor)
            known = node.metadata.get(_METADATA_KEY, ())
            # A list of sites would grow without end if the program returned one node forever.
            node.metadata[_METADATA_KEY] = [*(ref for ref in known if ref() is not None), weakref.ref(self)]

    def call_with_all(self, gradients: Any) -> None:
        """Handles the gradients of all outputs of a node, as a hook of the node."""
        self(gradients[self.output_nr])


class BaseTap(GradientTap):
    """A hook on the base of a view: if the view was written to, the gradient arrives only at its base."""

    __slots__ = ("shape", "view")

    def __init__(
        self, view: GradientTap, shape: torch.Size, measure: "Callable[[GradientTap, Any], None]"
    ) -> None:
        super().__init__(view.segment, measure)
        self.view = view
        self.shape = shape  # the shape of the view

    def __call__(self, gradient: Any) -> None:
        if not is_dynamo_compiling() and self.view.task != graph_task_id():
            self.receive(self, gradient)


_METADATA_KEY = "modtrace.gradient_taps"


def rehook_taps(outputs: Any, measure: "Callable[[GradientTap, Any], None]") -> list[Any]:
    """Registers again the hooks of taps below the outputs of a backward, and returns the handles.

    Args:
        measure: the function that the recorder's taps call; the taps of other recorders are ignored.
    """
    return [
        node.register_prehook(tap.call_with_all)
        for node, _, _ in walk_graph(root_nodes(outputs))
        for tap in _taps_at(node)
        if tap.handle is None and tap.receive is measure
    ]


def written_bases(outputs: Any) -> "set[GradientTap]":
    """Returns the taps on tensors that were written to through a view, in the graphs below a backward's outputs."""
    nodes = (node for node, _, _ in walk_graph(root_nodes(outputs)))
    edges = (edge for node in nodes for edge in edges_to_written_bases(node))
    return {tap for node, output_nr in edges for tap in _taps_at(node) if tap.output_nr == output_nr}


def _taps_at(node: Any) -> "list[GradientTap]":
    known = (ref() for ref in node.metadata.get(_METADATA_KEY, ()))
    return [tap for tap in known if tap is not None]
