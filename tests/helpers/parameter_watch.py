"""Drives the taps on parameters without a recorder, and keeps a copy of every tensor that they measure."""

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any, NamedTuple

import torch

from helpers.keeping import Keeper
from modtrace.collect.scopes import process
from modtrace.collect.scopes.tracker import ScopeTracker
from modtrace.collect.values.buffers import BufferTaps
from modtrace.collect.values.capture_masks import CaptureMasks
from modtrace.collect.values.measured import MeasuredParameters, columns_of
from modtrace.collect.values.micro_batches import MicroBatchTaps
from modtrace.collect.values.parameter_sites import ParameterSites
from modtrace.collect.values.parameters import ParameterTaps
from modtrace.collect.values.source import Measuring
from modtrace.measure.measurers.measurer import Measurement
from modtrace.recording.options.capture import Capture
from modtrace.torch_internals.modes import unseen


class Seen(NamedTuple):
    """One row as it would be written, with the tensor itself."""

    phase: str
    role: str
    path: str | None
    slot: str
    value: Any  # a tensor, or the note that says why there is none
    mask: int

    @property
    def site(self) -> tuple[str | None, str]:
        return self.path, self.slot


class Watch(Keeper):
    """Measures as a recorder would."""

    def __init__(self, captures: tuple[Capture, ...]) -> None:
        super().__init__()
        self.active = -1  # every capture
        self.rows: list[Seen] = []
        self.names: list[str] = []  # as whole tensors are called
        self.settled = 0
        self.errors: list[Exception] = []
        self._captures = captures
        self._closed: list[Any] = []
        self._copies: dict[Measurement, torch.Tensor] = {}

    def start(self, tracker: ScopeTracker) -> None:
        self.capture_masks = CaptureMasks(self._captures, tracker.names)
        sites = ParameterSites(tracker.names, self.capture_masks)
        measuring = Measuring(
            tracker, sites, self.capture_masks, self._measure, self._settle, self._failed, nullcontext
        )
        self.parameters = ParameterTaps(measuring, active=self._active)
        self.micro_batches = MicroBatchTaps(measuring)
        self.buffers = BufferTaps(measuring)
        self.sources = (self.parameters, self.micro_batches, self.buffers)
        self._tracker = tracker
        for source in self.sources:
            tracker.subscribers.add(source)

    def _active(self) -> int:
        return self.active & (1 << len(self._captures)) - 1

    def _failed(self, error: Exception, where: str) -> None:
        self.errors.append(error)

    def of(self, role: str, **chosen: Any) -> list[Seen]:
        """The rows of a role, in their order."""
        found = [each for each in self.rows if each.role == role]
        return [each for each in found if all(getattr(each, name) == is_ for name, is_ in chosen.items())]

    def values(self, role: str, **chosen: Any) -> dict[tuple[str | None, str], Any]:
        """The tensors of a role by site, each of which has one row."""
        found = self.of(role, **chosen)
        by_site = {each.site: each.value for each in found}
        assert len(by_site) == len(found)
        return by_site

    def step_ends(self) -> None:
        """The outermost calls that have ended belong to no open step any more."""
        closed, self._closed = self._closed, []
        for segment in closed:
            for source in self.sources:
                self._add(source.take_segment(segment))
        for source in self.sources:
            source.step_ended()

    def abandon(self) -> None:
        """Measures nothing any more."""
        for source in self.sources:
            source.abandon()

    def stop(self) -> None:
        """Takes every hook off."""
        self.abandon()
        for source in self.sources:
            self._tracker.subscribers.remove(source)
            source.stop()

    def _settle(self) -> None:
        self.settled += 1

    def _measure(self, tensor: torch.Tensor, mask: int, name: str) -> Measurement:
        found = Measurement(None, -1, tuple(tensor.shape), tensor.dtype, None)
        with unseen(), torch.inference_mode(False), torch.no_grad():
            self._copies[found] = tensor.detach().clone()
        self.names.append(name)
        assert mask
        return found

    def _add(self, measured: MeasuredParameters | None) -> None:
        sites = [] if measured is None else zip(*columns_of(measured.sites, measured.width), strict=True)
        for found, role, slot, owner, mask in sites:
            path = None if owner is None else owner.path
            value = self._copies.get(found, found.note)
            self.rows.append(Seen(measured.phase, role, path, slot, value, mask))

    # As a recorder would.

    def segment_opened(self, segment: Any, in_step: bool) -> None:
        super().segment_opened(segment, in_step)
        for source in self.sources:
            source.opened(segment, self._active())

    def segment_closed(self, segment: Any) -> None:
        for source in self.sources:
            source.closed(segment, self._active())
        self._closed.append(segment)

    def backward_ended(self, backward: Any) -> None:
        super().backward_ended(backward)
        self._add(self.micro_batches.take_backward(backward))

    def optimizer_ended(self, start_ns: int, end_ns: int, thread: int) -> None:
        self._add(self.parameters.take_optimizer(thread))


@contextmanager
def watching(*roots: torch.nn.Module, **options: Any) -> Iterator[Watch]:
    """Watches what one capture with these options wants of parameters."""
    with watching_for(Capture(**options), roots=roots) as watch:
        yield watch


@contextmanager
def watching_for(*captures: Capture, roots: tuple[torch.nn.Module, ...] = ()) -> Iterator[Watch]:
    """Watches what several captures want."""
    watch = Watch(captures)
    tracker = process.acquire(watch, strict=True)
    try:
        for root in roots:
            tracker.names.add_root(root)
        watch.start(tracker)
        yield watch
    finally:
        watch.step_ends()
        watch.stop()
        process.release(watch)
    assert watch.errors == []
