"""Defines the base class of value sources, which measure tensors of calls, optimizers, backwards, losses or buffers."""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import NamedTuple

from ..log.listeners import Listener
from ..log.segments import Segment
from ..log.thread_log import Backward
from ..scopes.tracker import ScopeTracker
from .capture_masks import CaptureMasks, Mask
from .measured import Measured
from .parameter_sites import Measure, ParameterSites


class Measuring(NamedTuple):
    """The functions with which all sources of one recording measure."""

    tracker: ScopeTracker
    sites: ParameterSites
    capture_masks: CaptureMasks
    measure: Measure  # measures what is wanted of a tensor; the name is for whole tensors
    settle: Callable[[], None]  # copies tensors whose copy was deferred, before they are written to
    failed: Callable[[Exception, str], None]  # receives an internal error and the place where it was raised
    together: Callable[[], AbstractContextManager[None]]  # measures all tensors at a block's end


class ValueSource(Listener):
    """One source of values in a recording, which `ValueRecorder` drives. A method that is not overridden does nothing.

    As a listener it also receives events of the tracker. The lock over these events is held in `opened`, `closed`,
    `dropped`, `step_ended` and all methods whose names begin with `take_`.
    """

    def __init__(self, measuring: Measuring) -> None:
        """Starts idle, until a segment is opened, a backward begins or an optimizer steps."""
        self._tracker, self._sites, self._capture_masks = measuring[:3]
        self._measure, self._settle, self._failed, self._together = measuring[3:]
        self._is_abandoned = False

    def opened(self, segment: Segment, active: Mask) -> None:
        """Receives an outermost call that begins, with the captures that may want its step."""

    def closed(self, segment: Segment, active: Mask) -> None:
        """Receives an outermost call that has ended."""

    def dropped(self, segment: Segment) -> None:
        """Receives an outermost call that did not begin after all."""

    def backward_opened(self, backward: Backward, active: Mask) -> None:
        """Receives a backward that begins, with the captures that may want its step."""

    def take_backward(self, backward: Backward | None) -> Measured | None:
        """Returns the measurements of an ended backward.

        `backward` is None for backwards that did not pass the wrapped engine entry.
        """

    def take_optimizer(self, thread: int) -> Measured | None:
        """Returns the measurements around the optimizer step of a thread."""

    def take_segment(self, segment: Segment) -> Measured | None:
        """Returns the measurements in a segment whose step has ended."""

    def taken_later(self, segments: Sequence[Segment], thread: int) -> list[Measured]:
        """Returns the measurements that ends of these segments' step, or of the thread's optimizer step, will take."""
        return []

    def step_ended(self) -> None:
        """Removes the hooks that no open step needs. It is called after `take_segment` for all segments of the step."""

    def abandon(self) -> None:
        """Stops measuring, because this process is a fork or something has failed. It takes no lock."""
        self._is_abandoned = True

    def stop(self) -> None:
        """Removes every hook, and drops everything that is held. It is called after `abandon` of all sources."""
