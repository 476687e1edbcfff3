"""Stops a run with `NonFiniteError` before an optimizer uses values that are not finite."""

import threading
import warnings
import weakref
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple, NoReturn

import torch
from torch import nn

from ...errors import ModtraceWarning, NonFiniteError
from ...recording.triggers.step_conditions import NonFiniteFinding
from ...recording.triggers.watch import TriggerFinding
from ...torch_internals.graph_captures import graph_captures
from ...torch_internals.modes import unseen
from ...torch_internals.unseen_steps import UnseenSteps
from ..log.listeners import Listener, Subscribers, notify_all
from ..log.thread_log import Backward, ThreadLog
from .row_writer import Rows, StepHolder

_NOT_STEPPED = "The optimizer has not stepped: parameters and its state are as they were before."

_TRACED = (
    'torch.compile has compiled an optimizer\'s step together with other code, so on_nonfinite="stop" raises only when '
    "the step has ended; compile optimizer.step itself"
)


class OpenStep(NamedTuple):
    """The rows of an open step that has values that are not finite."""

    number: int
    rows: Rows
    #: Tensors measured for the optimizer that begins, which are lost unless it ends.
    keep: Callable[[], None]


class NonFiniteStop(Listener):
    """Checks each step when its optimizer begins. A finding in an ended step is raised by the next call of a module."""

    def __init__(
        self,
        flight_recorder: StepHolder | None,
        writing: threading.RLock,
        read_open: Callable[[], OpenStep | None],
        numbers: Callable[[None], Sequence[int]],
    ) -> None:
        """Creates a listener, which receives nothing before `start()`, and never anything unless a trigger needs it.

        Args:
            flight_recorder: the sink, if it checks triggers; None otherwise.
            writing: the lock of the sink.
            read_open: reads the open step; returns None if all measured values in it are finite.
            numbers: returns the possible numbers of the running optimizer's step.
        """
        self._numbers = numbers
        self._flight_recorder = flight_recorder
        self._writing = writing
        self._read_open = read_open
        self._subscribers: Subscribers | None = None  # set while it listens
        self._unseen = UnseenSteps(
            compiled=self._compiled_step,
            traced=self._step_was_traced,
            skipped=lambda _: self._may_skip(lambda: True),
        )
        self._used_in: int | None = None  # the last step in which an optimizer had a closure
        self._has_warned = False
        self._stopped_in: int | None = None  # the last step in which the run was stopped
        self._found: TriggerFinding | None = None  # a finding in an ended step that is yet to be raised
        self._raised: weakref.ref[NonFiniteError] | None = None  # weak: it holds frames and tensors

    def start(self, subscribers: Subscribers) -> None:
        """Starts listening, after the listeners that measure what an optimizer will use."""
        if self._flight_recorder is not None and self._flight_recorder.finds_origin:
            self._subscribers = subscribers
            subscribers.add(self, "before_optimizer", "closure_ended", "after_optimizer", "backward_began")
            self._unseen.start()

    def stop(self) -> None:
        """Stops listening."""
        if self._subscribers is not None:
            self._subscribers.remove(self)
            self._subscribers = None
            self._unseen.stop()

    def has_raised(self, error: BaseException | None) -> bool:
        """Returns whether an error is the last one that this object raised."""
        return error is not None and self._raised is not None and self._raised() is error

    def before_optimizer(self, optimizer: Any, has_closure: bool) -> None:
        """Raises if the step has values that are not finite. With a closure, this is checked after the closure."""
        if self._flight_recorder is None:
            return
        # A fused optimizer skips the step itself if a GradScaler tells it to.
        found_inf = getattr(optimizer, "found_inf", None)
        is_skipping = (lambda: False) if found_inf is None else partial(_is_true, found_inf)
        self._may_skip(is_skipping)
        if is_skipping() is False:
            self._check_open()

    def closure_ended(self, optimizer: Any) -> None:
        """Raises if the closure computed values that are not finite."""
        self._check_open()

    def after_optimizer(self, optimizer: Any, has_closure: bool) -> None:
        """Notes the step in which an optimizer may have used values that were not checked."""
        if has_closure:
            self._used_in = self._number()

    def _check_open(self) -> None:
        if self._flight_recorder is None or not self._flight_recorder.stops_runs:
            return
        with self._writing:
            step = self._read_open()
            finding = None if step is None else self._flight_recorder.find_in_open(step.rows)
        if step is not None and finding is not None:
            self._stopped_in = step.number
            step.keep()
            self._raise(step.number, finding, "" if step.number == self._used_in else _NOT_STEPPED)

    def backward_began(self, backward: Backward) -> None:
        """Also hooks compiled code, if the compiler was imported since."""
        self._unseen.start()

    def _compiled_step(self, optimizer: Any, has_closure: bool) -> None:
        """Does the work of the hook before an optimizer, which compiled code does not run."""
        if self._subscribers is not None:
            with self._subscribers.guard(None):
                notify_all(self._subscribers.before_optimizer, optimizer, has_closure)

    def _step_was_traced(self) -> None:
        if not self._has_warned and self._flight_recorder is not None and self._flight_recorder.stops_runs:
            self._has_warned = True
            warnings.warn(_TRACED, ModtraceWarning, stacklevel=2)

    def _number(self) -> int | None:
        """Returns the number of the step of the running optimizer; None if it is not recorded."""
        return next(iter(self._numbers(None)[-1:]), None)

    def _may_skip(self, is_skipping: Callable[[], bool | None]) -> None:
        number = self._number()
        if self._flight_recorder is not None and number is not None:
            self._flight_recorder.may_skip(number, is_skipping)

    def check_ended(self) -> None:
        """Takes the findings in ended steps, which the next call of a module will raise."""
        if self._take_found() and self._subscribers is not None:
            self._subscribers.remove(self, "entering")
            self._subscribers.add(self, "entering")

    def entering(self, log: ThreadLog, module: nn.Module, args: Any) -> None:
        """Raises a finding in an ended step."""
        self.raise_found()

    def raise_found(self) -> None:
        """Raises a finding in an ended step, only once."""
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


def _is_true(flag: Any) -> bool | None:
    """Returns whether a flag on a device is set; None if it cannot be read, because a CUDA graph is captured."""
    on_device = flag if isinstance(flag, torch.Tensor) else None
    with unseen(), graph_captures.device_work(on_device) as is_allowed:
        return bool(flag) if is_allowed else None
