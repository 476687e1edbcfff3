"""Defines hooks on the tensors of calls: a step's end removes them, a later backward registers them again."""

import threading
import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from ...measure.measurers.measurer import Measurement
from ...measure.measurers.want import Want
from ...torch_internals.autograd import graph_task_id
from ...torch_internals.dynamo import is_dynamo_compiling
from ...torch_internals.tensors import GradientHook, output_nr_of
from ..backward.graph_walk import edges_to_written_bases, node_of, root_nodes, walk_graph
from ..log.segments import Segment
from .capture_masks import ROLE_BITS, Mask


class PythonTap:
    """What a hook on a tensor knows. Where it is compiled, the garbage collector does not visit it."""

    __slots__ = (
        "__weakref__", "event", "hooks_ref", "mark", "more", "number", "output", "output_nr", "path", "receive", "ref",
        "segment", "shape", "slot", "task", "version", "view", "want",
    )  # fmt: skip

    def __init__(self, segment: Segment, receive: Callable[[Any, Any], None]) -> None:
        self.receive, self.hooks_ref = receive, None
        self.segment = segment
        #: The event of the site: the exit of the call that first returned the tensor, or the entry of one that took it.
        self.event = -1
        self.slot = ""
        self.mark = 0  # the gradient's role at the site and the captures that want it; see `mark_of`
        self.want: Want | None = None  # what these captures want of it; None: what those of all sites want
        #: The sites of further calls that returned the tensor or took it.
        self.more: list[tuple[int, str, int]] | None = None
        self.path = ""  # the name under which whole tensors of the first site are kept
        self.output: Measurement | None = None  # the measurement of the tensor itself, if a capture wants it
        self.ref: weakref.ref[torch.Tensor] | None = None
        self.version: int | None = None
        self.number = -1  # the sequence number of the node that made the tensor ...
        self.output_nr = 0  # ... and, of the base of a view, which of its outputs it is
        self.task = -1  # the graph task in which the last gradient came
        self.view: Any = None  # the tap of the view whose base it is on ...
        self.shape: Any = None  # ... and the view's shape


tap_gradient: Callable[..., Any] | None
tap_tensor: Callable[..., Any] | None
try:
    from ._taps import Tap, tap_gradient, tap_tensor
except ImportError:
    Tap, tap_gradient, tap_tensor = PythonTap, None, None  # type: ignore[assignment,misc]


class GradientTap(Tap, GradientHook):
    """A hook on a tensor, with the sites under which its gradient is stored.

    While the segment runs, the tap also shows whether a tensor was already measured. The hook is removed when the step
    has ended; a later backward of the same graph registers it again.
    """

    __slots__ = ()

    def is_of(self, tensor: torch.Tensor, version: int | None) -> bool:
        """Returns whether the tap is on this tensor, and the tensor was not written to since."""
        return (
            version is not None and self.version == version and self.ref is not None and self.ref() is tensor
        )

    def add_site(self, event: int, slot: str, mark: int) -> None:
        """Adds the site of another call that returned the same tensor, or took it."""
        if self.more is None:
            self.more = []
        if mark != self.mark:
            self.want = None
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
        super().hook(tensor)
        node = node_of(tensor)
        if node is not None:
            self.number = node._sequence_nr()

    def rehook(self) -> bool:
        """Registers the hook that was removed. Returns False if the graph of its tensor is dead."""
        hooks = self.living_hooks()
        if hooks is None:
            return False
        hooks[self] = self
        return True


class BaseTap(GradientTap):
    """A hook on the base of a view: if the view was written to, the gradient arrives only at its base."""

    __slots__ = ()

    def watch(self, view: GradientTap, shape: torch.Size, base: torch.Tensor) -> None:
        """Registers the hook on the base of a view."""
        self.view, self.shape, self.output_nr = view, shape, output_nr_of(base)
        self.hook(base)

    def __call__(self, gradient: Any) -> None:
        if not is_dynamo_compiling() and self.view.task != graph_task_id():
            self.receive(self, gradient)


#: The number of segments of ended steps that are kept without checking whether their graphs live.
_KEPT_UNCHECKED = 16


class SuspendedTaps:
    """The taps of ended steps: they have no hooks, and their graphs may live."""

    def __init__(self) -> None:
        self._segments: list[tuple[Segment, list[GradientTap]]] = []
        self._check_at = _KEPT_UNCHECKED
        #: Segments that lived on into a later backward, and their taps by the sequence numbers of their nodes. Threads
        #: number their nodes alike, so that a backward may hook a tap of another thread for nothing.
        self._numbered: list[tuple[Segment, list[GradientTap]]] = []
        self._by_number: dict[int, list[GradientTap]] = {}
        #: For each tap whose hook is registered again, for how many backwards, as of several threads or nested ones.
        self._users: Counter[GradientTap] = Counter()
        self._lock = threading.RLock()

    def add(self, segment: Segment, taps: list[GradientTap]) -> None:
        """Removes the hooks of a segment, and keeps its taps while its graph lives."""
        for tap in taps:
            tap.unhook()
        with self._lock:
            self._segments.append((segment, taps))
            if len(self._segments) > self._check_at:
                self._forget_dead()
                self._check_at = 2 * len(self._segments) + _KEPT_UNCHECKED

    def rehook(self, outputs: Any) -> list[GradientTap]:
        """Registers again the hooks that a backward of these outputs may reach, and returns their taps.

        Pass the taps to `release` when the backward has ended.
        """
        with self._lock:
            self._forget_dead()
            for _, taps in self._segments:
                for tap in taps:
                    if tap.number >= 0:
                        self._by_number.setdefault(tap.number, []).append(tap)
            self._numbered += self._segments
            self._segments = []
        if not self._by_number:
            return []
        numbers = dict.fromkeys(number for _, number, _ in walk_graph(root_nodes(outputs)))
        with self._lock:
            rehooked = [tap for number in numbers for tap in self._by_number.get(number, ()) if tap.rehook()]
            self._users.update(rehooked)
        return rehooked

    def release(self, taps: Sequence[GradientTap]) -> None:
        """Removes the hooks that a backward needed, unless another one that runs needs them."""
        with self._lock:
            for tap in taps:
                self._users[tap] -= 1
                if self._users[tap] <= 0:
                    del self._users[tap]
                    tap.unhook()

    def _forget_dead(self) -> None:
        self._segments = [(segment, taps) for segment, taps in self._segments if segment.has_graph()]
        numbered, self._numbered = self._numbered, []
        for segment, taps in numbered:
            if segment.has_graph():
                self._numbered.append((segment, taps))
                continue
            for tap in taps:
                others = [other for other in self._by_number.pop(tap.number, ()) if other is not tap]
                if others:
                    self._by_number[tap.number] = others


def written_bases(outputs: Any) -> set[tuple[int, int]]:
    """Returns the nodes below a backward's outputs whose results were written to through a view.

    Each is given by its sequence number and the number of its output.
    """
    nodes = (node for node, _, _ in walk_graph(root_nodes(outputs)))
    return {
        (below._sequence_nr(), output_nr)
        for node in nodes
        for below, output_nr in edges_to_written_bases(node)
    }
