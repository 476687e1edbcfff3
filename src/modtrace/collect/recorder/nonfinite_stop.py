"""Stops a run by `NonFiniteError` before an optimizer uses values that are not finite."""

import threading
import weakref
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple, NoReturn

from torch import nn

from ...errors import NonFiniteError
from ...recording.triggers.step_conditions import NonFiniteFinding
from ...recording.triggers.watch import Asked
from ...torch_internals.modes import unseen
from ..log.listeners import Listener, Subscribers
from ..log.thread_log import ThreadLog
from .row_writer import Rows, StepHolder

_NOT_STEPPED = "The optimizer has not stepped: parameters and its state are as they were before."


class OpenStep(NamedTuple):
    """The rows of a step that has not ended, and in which something is not finite."""

    number: int
    rows: Rows
    keep: Callable[
        [], None
    ]  # what was measured for the optimizer that begins, and would go if it does not end


class NonFiniteStop(Listener):
    """Looks at each step when its optimizer begins. What is found when a step has ended is raised by the next call."""

    def __init__(
        self,
        flight_recorder: StepHolder | None,
        writing: threading.RLock,
        read_open: Callable[[], OpenStep | None],
        numbers: Callable[[None], Sequence[int]],
    ) -> None:
        """Creates a listener, which hears nothing before `start()`, and never anything if no trigger asks for it.

        Args:
            flight_recorder: the sink, if it checks triggers.
            writing: the lock over the sink.
            read_open: reads the open step; None if all that was measured in it is finite.
            numbers: returns the numbers that the step of the running optimizer may have.
        """
        self._numbers = numbers
        self._flight_recorder = flight_recorder
        self._writing = writing
        self._read_open = read_open
        self._subscribers: Subscribers | None = None  # while it listens
        self._stopped_in: int | None = None  # the last step in which the run was stopped
        self._found: Asked | None = None  # in a step that has ended, to be raised
        self._raised: weakref.ref[NonFiniteError] | None = None  # it holds frames, and these hold tensors

    def start(self, subscribers: Subscribers) -> None:
        """Begins to listen, behind those that measure what an optimizer will use."""
        if self._flight_recorder is not None and self._flight_recorder.tells:
            self._subscribers = subscribers
            subscribers.add(self, "before_optimizer")

    def stop(self) -> None:
        """Ends to listen."""
        if self._subscribers is not None:
            self._subscribers.remove(self)
            self._subscribers = None

    def has_raised(self, error: BaseException | None) -> bool:
        """Returns whether an error is the last one that was raised here."""
        return error is not None and self._raised is not None and self._raised() is error

    def before_optimizer(self, optimizer: Any, has_closure: bool) -> None:
        """Raises if the step has made values that are not finite. What a closure computes is seen when it has ended."""
        if self._flight_recorder is None:
            return
        is_skipping = _may_skip(optimizer)
        if is_skipping is not None:
            for number in self._numbers(None)[-1:]:
                self._flight_recorder.may_skip(number, is_skipping)
        if not self._flight_recorder.stops_runs or (is_skipping is not None and is_skipping()):
            return
        with self._writing:
            step = self._read_open()
            finding = None if step is None else self._flight_recorder.find_in_open(step.rows)
        if step is not None and finding is not None:
            self._stopped_in = step.number
            step.keep()
            self._raise(step.number, finding, _NOT_STEPPED)

    def look_at_ended(self) -> None:
        """Takes what was found in steps that have ended, for the next call of a module to raise."""
        if self._take_found() and self._subscribers is not None:
            self._subscribers.remove(self, "entering")
            self._subscribers.add(self, "entering")

    def entering(self, log: ThreadLog, module: nn.Module, args: Any) -> None:
        """Raises what was found in a step that has ended."""
        self.raise_found()

    def raise_found(self) -> None:
        """Raises what was found in a step that has ended, once."""
        self._take_found()
        found, self._found = self._found, None
        if self._subscribers is not None:
            self._subscribers.remove(self, "entering")
        if found is not None:
            self._raise(found.step, found.finding)

    def _take_found(self) -> bool:
        for asked in self._flight_recorder.take_stops() if self._flight_recorder is not None else ():
            if asked.step != self._stopped_in and self._found is None:
                self._found = asked
        return self._found is not None

    def _raise(self, step: int, finding: NonFiniteFinding, more: str = "") -> NoReturn:
        error = NonFiniteError(((finding.text or f"step {step}: {finding.reason}\n") + more).rstrip())
        self._raised = weakref.ref(error)
        raise error


def _may_skip(optimizer: Any) -> Callable[[], bool] | None:
    """Returns what tells whether a fused optimizer skips its step, where a GradScaler leaves that to it."""
    found_inf = getattr(optimizer, "found_inf", None)
    return None if found_inf is None else partial(_is_true, found_inf)


def _is_true(flag: Any) -> bool:
    with unseen():
        return bool(flag)
