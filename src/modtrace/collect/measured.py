"""What was measured, until its step is written. Few objects a tensor: Python's garbage collector visits each."""

import weakref
from collections.abc import Callable, Iterator
from typing import Any

import torch

from ..measure.measurer import Measurement
from ..torch_internals import is_dynamo_compiling
from .names import NamedModule
from .segments import Segment


class GradientTap:
    """A hook on an output: the sites that its gradient is stored under.

    While the segment runs it also tells whether a tensor is the one that was measured.
    """

    __slots__ = ("_measure", "event", "more", "output", "ref", "segment", "slot", "version")

    __torch_unserializable__ = True  # torch.save warns of hooks that do not say so (torch.utils.hooks, 2.13)

    output: Measurement

    def __init__(
        self, segment: Segment, event: int, slot: str, measure: "Callable[[GradientTap, Any], None]"
    ) -> None:
        self.segment = segment
        self.event = event  # the exit of the call that returned the tensor first
        self.slot = slot
        self.more: list[tuple[int, str]] | None = None  # of the calls that returned it on
        self.ref: weakref.ref[torch.Tensor] | None = None
        self.version: int | None = None
        self._measure = measure

    def is_of(self, tensor: torch.Tensor, version: int | None) -> bool:
        """Whether this is the tensor that was measured, and nobody has written to it since."""
        return (
            version is not None and self.version == version and self.ref is not None and self.ref() is tensor
        )

    def add_site(self, event: int, slot: str) -> None:
        """Another call returned the same tensor."""
        if self.more is None:
            self.more = []
        self.more.append((event, slot))

    def sites(self) -> Iterator[tuple[int, str]]:
        """Exit events and slots, the outermost call first."""
        yield from reversed(self.more or ())
        yield self.event, self.slot

    def __call__(self, gradient: Any) -> None:
        if not is_dynamo_compiling():
            self._measure(self, gradient)


class MeasuredOutputs:
    """What the calls of one segment returned."""

    __slots__ = ("events", "handles", "intervals", "known", "samples", "segment", "slots", "thread")

    def __init__(self, segment: Segment) -> None:
        self.segment = segment
        self.thread: int = segment.log.number
        self.samples: list[Measurement] = []
        self.events: list[int] = []
        self.slots: list[str] = []
        self.intervals: list[int] = []  # start_ns, end_ns, start_ns, ... of measuring
        self.known: dict[int, GradientTap] = {}  # by id of the tensor; only while the segment runs
        self.handles: list[Any] = []

    def add(self, sample: Measurement, event: int, slot: str) -> None:
        """Adds a site."""
        self.samples.append(sample)
        self.events.append(event)
        self.slots.append(slot)

    def close(self) -> None:
        """The segment has ended: what is returned from now on is another tensor."""
        for tap in self.known.values():
            tap.ref = None
        self.known = {}

    def remove_hooks(self) -> None:
        """Takes the hooks off the tensors that are still there."""
        for handle in self.handles:
            handle.remove()
        self.handles = []


class MeasuredGradients:
    """The gradients of outputs that one backward computed."""

    __slots__ = ("intervals", "last", "last_version", "samples", "taps", "thread")

    def __init__(self, thread: int) -> None:
        self.thread = thread
        self.samples: list[Measurement] = []
        self.taps: list[GradientTap] = []
        self.intervals: list[int] = []
        self.last: weakref.ref[torch.Tensor] | None = None
        self.last_version: int | None = None

    def add(self, sample: Measurement, tap: GradientTap) -> None:
        """Adds the sites of a tap."""
        self.samples.append(sample)
        self.taps.append(tap)

    def is_last(self, gradient: torch.Tensor, version: int | None) -> bool:
        """Whether this is the tensor that was measured last, and nobody has written to it since."""
        known = version is not None and version == self.last_version and self.last is not None
        return known and self.last is not None and self.last() is gradient


class MeasuredParameters:
    """Parameters and their gradients before one optimizer step."""

    __slots__ = ("intervals", "owners", "roles", "samples", "slots", "thread")

    def __init__(self, thread: int) -> None:
        self.thread = thread
        self.samples: list[Measurement] = []
        self.roles: list[str] = []
        self.slots: list[str] = []
        self.owners: list[NamedModule | None] = []
        self.intervals: list[int] = []

    def add(self, sample: Measurement, role: str, slot: str, owner: NamedModule | None) -> None:
        """Adds a site."""
        self.samples.append(sample)
        self.roles.append(role)
        self.slots.append(slot)
        self.owners.append(owner)


Measured = MeasuredOutputs | MeasuredGradients | MeasuredParameters
