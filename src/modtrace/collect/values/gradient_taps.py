"""Hooks on the tensors of calls, which can be removed when a step ends and registered again for a later backward."""

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

    While the segment runs, the tap also shows whether a tensor is the one that was measured. When the step has ended,
    the hook is removed. The graph still refers to the tap, and a later backward registers the hook again.
    """

    __slots__ = (
        "event", "mark", "more", "output", "output_nr", "path", "ref", "segment", "slot", "task", "version",
    )  # fmt: skip

    output_nr: int

    def __init__(self, segment: Segment, measure: "Callable[[GradientTap, Any], None]") -> None:
        self.receive, self.handle = measure, None  # as the base class does, without a call of it
        self.segment = segment
        #: The exit of the call that returned the tensor first, or the entry of one that was given it.
        self.event = -1
        self.slot = ""
        self.mark = 0  # what its gradient is at that site, and for which captures; see `mark_of`
        #: Of the calls that returned it on, or were given it.
        self.more: list[tuple[int, str, int]] | None = None
        self.path = ""  # of the first site, where whole tensors are kept
        self.output: Measurement | None = None  # of the tensor itself, if it is wanted
        self.ref: weakref.ref[torch.Tensor] | None = None
        self.version: int | None = None
        self.task = -1  # the graph task in which its gradient came last

    def is_of(self, tensor: torch.Tensor, version: int | None) -> bool:
        """Returns whether this is the tensor that was measured, with no write to it since."""
        return (
            version is not None and self.version == version and self.ref is not None and self.ref() is tensor
        )

    def add_site(self, event: int, slot: str, mark: int) -> None:
        """Adds the site of another call that returned the same tensor, or was given it."""
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
        """Registers the hook, which receives the gradient of the tensor from now on."""
        self.handle = add_hook(tensor, self)
        node = node_of(tensor)
        if node is not None:
            self.output_nr = output_nr_of(tensor)
            known = node.metadata.get(_METADATA_KEY, ())
            # The same node may be returned for ever.
            node.metadata[_METADATA_KEY] = [*(ref for ref in known if ref() is not None), weakref.ref(self)]

    def call_with_all(self, gradients: Any) -> None:
        """Serves as a hook of the node, which receives the gradients of all its outputs."""
        self(gradients[self.output_nr])


class BaseTap(GradientTap):
    """A hook on the base of a view. If the view was written to, its gradient arrives at the base alone."""

    __slots__ = ("shape", "view")

    def __init__(
        self, view: GradientTap, shape: torch.Size, measure: "Callable[[GradientTap, Any], None]"
    ) -> None:
        super().__init__(view.segment, measure)
        self.view = view
        self.shape = shape  # the view's

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
