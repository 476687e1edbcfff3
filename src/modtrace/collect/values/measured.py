"""What was measured, until its step is written. Few objects a tensor: Python's garbage collector visits each."""

import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Protocol

import torch

from ...measure.measurer import Measurement
from ...measure.rows import Rows
from ...recording.module_path import join
from ...recording.role import GRAD_OUTPUT, ROLES
from ...torch_internals import grad_fn_of, graph_task_id, is_dynamo_compiling, output_nr_of
from ..backward.graph_walk import base_made_in, edges_to_written_bases, nodes_below
from ..log.call_context import CallContext
from ..log.segments import Segment
from ..names.module_names import NamedModule
from .capture_masks import ROLE_CODE, Mask

#: A site's role and the captures that want it in one number.
ROLE_BITS = 4
ROLE_CODES = (1 << ROLE_BITS) - 1


def mark_of(mask: Mask, code: int) -> int:
    """A role, by its code, and the captures that want it."""
    return mask << ROLE_BITS | code


class GradientTap:
    """A hook on an output: the sites that its gradient is stored under.

    While the segment runs it also tells whether a tensor is the one that was measured. When the step has ended the
    hook is taken off; the graph knows the tap still, and it is hooked in again for a backward that comes after that.
    """

    __slots__ = (
        "__weakref__", "_measure", "event", "handle", "mark", "more", "output", "output_nr", "path", "ref", "segment",
        "slot", "task", "version",
    )  # fmt: skip

    __torch_unserializable__ = True  # torch.save warns of hooks that do not say so (torch.utils.hooks, 2.13)

    output_nr: int

    def __init__(self, segment: Segment, measure: "Callable[[GradientTap, Any], None]") -> None:
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
        self.handle: Any = None  # of the hook; None: there is none
        self.task = -1  # the graph task in which its gradient came last
        self._measure = measure

    def is_of(self, tensor: torch.Tensor, version: int | None) -> bool:
        """Whether this is the tensor that was measured, and nobody has written to it since."""
        return (
            version is not None and self.version == version and self.ref is not None and self.ref() is tensor
        )

    def is_of_recorder(self, measure: "Callable[[GradientTap, Any], None]") -> bool:
        """Whether this is what it calls."""
        return self._measure is measure

    def add_site(self, event: int, slot: str, mark: int) -> None:
        """Another call returned the same tensor, or was given it."""
        if self.more is None:
            self.more = []
        self.more.append((event, slot, mark))

    def sites(self) -> Iterator[tuple[int, str, int]]:
        """Events, slots and marks, the outermost call first."""
        yield from reversed(self.more or ())
        yield self.event, self.slot, self.mark

    @property
    def mask(self) -> Mask:
        """The captures that want its gradient."""
        mask = self.mark >> ROLE_BITS
        for _, _, mark in self.more or ():
            mask |= mark >> ROLE_BITS
        return mask

    def hook(self, tensor: torch.Tensor) -> None:
        """Hears of the tensor's gradient from now on."""
        self.handle = _register_hook(tensor, self)
        node = grad_fn_of(tensor)
        if node is not None:
            self.output_nr = output_nr_of(tensor)
            known = _metadata_of(node).setdefault(_METADATA_KEY, [])
            known[:] = [ref for ref in known if ref() is not None]  # the same node may be returned for ever
            known.append(weakref.ref(self))

    def unhook(self) -> None:
        """Hears of it no more."""
        if self.handle is not None:
            self.handle.remove()
            self.handle = None

    def __call__(self, gradient: Any) -> None:
        if not is_dynamo_compiling():
            self._measure(self, gradient)

    def call_with_all(self, gradients: Any) -> None:
        """As a hook of the node, which gets the gradients of all its outputs."""
        self(gradients[self.output_nr])


class BaseTap(GradientTap):
    """A hook on what an output is a view of: when the view was written to, its gradient comes there alone."""

    __slots__ = ("shape", "view")

    def __init__(
        self, view: GradientTap, shape: torch.Size, measure: "Callable[[GradientTap, Any], None]"
    ) -> None:
        super().__init__(view.segment, measure)
        self.view = view
        self.shape = shape  # the view's

    def __call__(self, gradient: Any) -> None:
        if not is_dynamo_compiling() and self.view.task != graph_task_id():
            self._measure(self, gradient)


def _metadata_of(node: Any) -> dict[str, Any]:
    """What a node keeps for whoever wants to know it again."""
    metadata: dict[str, Any] = node.metadata
    return metadata


_METADATA_KEY = "modtrace.gradient_taps"
_register_hook: Callable[[torch.Tensor, Any], Any] = torch.Tensor.register_hook


def hook_sleeping_taps(outputs: Any, measure: "Callable[[GradientTap, Any], None]") -> list[Any]:
    """Hooks the taps that lie without a hook in the graphs of what a backward begins with; returned are the handles.

    Args:
        measure: of whom the taps are: another recorder's are left alone.
    """
    return [
        node.register_prehook(tap.call_with_all)
        for node in nodes_below(outputs)
        for tap in _taps_at(node)
        if tap.handle is None and tap.is_of_recorder(measure)
    ]


def written_bases(outputs: Any) -> "set[GradientTap]":
    """The taps at tensors that were written to through a view, in the graphs of what a backward begins with."""
    edges = (edge for node in nodes_below(outputs) for edge in edges_to_written_bases(node))
    return {tap for node, output_nr in edges for tap in _taps_at(node) if tap.output_nr == output_nr}


def _taps_at(node: Any) -> "list[GradientTap]":
    known = (ref() for ref in _metadata_of(node).get(_METADATA_KEY, ()))
    return [tap for tap in known if tap is not None]


class MeasuredOutputs:
    """What the calls of one segment returned and were given."""

    __slots__ = ("active", "intervals", "known", "segment", "sites", "taps", "thread")

    def __init__(self, segment: Segment, active: Mask) -> None:
        self.segment = segment
        self.active = active  # the captures that may look at its step
        self.thread: int = segment.log.number
        self.sites: list[tuple[Measurement, int, str, int]] = []  # with event, slot and mark
        self.intervals: list[int] = []  # start_ns, end_ns, start_ns, ... of measuring
        self.known: dict[int, GradientTap] = {}  # by id of the tensor; only while the segment runs
        self.taps: list[GradientTap] = []  # with a hook

    def close(self) -> None:
        """The segment has ended: what is returned from now on is another tensor."""
        for tap in self.known.values():
            tap.ref = None
        self.known = {}


class Seen:
    """One call's tensors, while they are looked at."""

    __slots__ = ("event", "grad_mark", "mark", "measured", "place")

    def __init__(
        self, measured: MeasuredOutputs, event: int, place: CallContext, mark: int, grad_mark: int
    ) -> None:
        self.measured = measured
        self.event = event
        self.place = place
        self.mark = mark
        self.grad_mark = grad_mark

    def name(self, slot: str) -> str:
        """What a whole tensor is called."""
        return name_of_tensor(self.place.path, self.mark, slot)

    def base_of(self, tensor: torch.Tensor) -> torch.Tensor | None:
        """What a returned tensor is a view of; see `base_made_in`."""
        if self.grad_mark & ROLE_CODES != ROLE_CODE[GRAD_OUTPUT]:
            return None
        call = self.measured.segment.call_after(self.event - 1)  # the one that has just ended
        return None if call is None else base_made_in(call, tensor)


def name_of_tensor(path: str, mark: int, slot: str) -> str:
    """What a whole tensor is called, of a module at this path."""
    return join(path, ROLES[mark & ROLE_CODES] + slot)


class MeasuredGradients:
    """The gradients of outputs that one backward computed."""

    __slots__ = ("handles", "intervals", "last", "last_version", "sites", "thread", "written")

    def __init__(self, thread: int) -> None:
        self.thread = thread
        self.sites: list[tuple[Measurement, GradientTap]] = []
        self.intervals: list[int] = []
        self.handles: list[Any] = []  # of taps that were hooked in again for this backward
        self.last: weakref.ref[torch.Tensor] | None = None
        self.last_version: int | None = None
        self.written: set[GradientTap] | None = None  # see `written_bases`; None: nobody has asked

    def close(self) -> None:
        """The backward has ended."""
        self.last = self.written = None
        for handle in self.handles:
            handle.remove()
        self.handles = []

    def is_last(self, gradient: torch.Tensor, version: int | None) -> bool:
        """Whether this is the tensor that was measured last, and nobody has written to it since."""
        known = version is not None and version == self.last_version and self.last is not None
        return known and self.last is not None and self.last() is gradient


class MeasuredParameters:
    """Tensors of modules at one moment: parameters with all that belongs to them, or buffers."""

    __slots__ = ("active", "intervals", "phase", "sites", "thread")

    def __init__(self, thread: int, phase: str, active: Mask) -> None:
        self.thread = thread
        self.phase = phase
        self.active = active  # the captures that may look at its step
        #: With role, slot, owner and the captures that want it.
        self.sites: list[tuple[Measurement, str, str, NamedModule | None, Mask]] = []
        self.intervals: list[int] = []


Measured = MeasuredOutputs | MeasuredGradients | MeasuredParameters


class HasSites(Protocol):
    """Something with measurements, each with what it is of."""

    sites: list[Any]
    intervals: list[int]


def free_rows(measured: Iterable[HasSites]) -> None:
    """Lets other tensors have the rows of what is written, or not wanted."""
    taken: dict[Rows, dict[int, None]] = {}
    for each in measured:
        for sample, *_ in each.sites:
            if sample.rows is not None:
                taken.setdefault(sample.rows, {})[sample.row] = None
        each.sites.clear()
    for rows, numbers in taken.items():
        rows.free(list(numbers))
