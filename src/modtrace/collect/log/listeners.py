"""Who listens to what a tracker sees, and what happens when our own work around that fails."""

from collections.abc import Callable
from typing import Any, Protocol

from torch import nn

from ..names.module_names import ModuleNames
from .call_context import Place
from .segments import Segment
from .thread_log import Backward, ThreadLog


class Listener(Protocol):
    """What a recorder hears. Events per outermost call, backward and optimizer step; never per call."""

    wants_backward_events: bool  # when each call's backward begins and ends
    wants_additions: bool  # when the engine adds up gradients

    def segment_opened(self, segment: Segment, in_step: bool) -> None:
        """An outermost call begins; `in_step`: it belongs to what runs already and starts nothing new."""

    def segment_closed(self, segment: Segment) -> None:
        """It has ended."""

    def segment_dropped(self, segment: Segment) -> None:
        """It never began: an interrupt came just before. Some listeners may not have heard of it at all."""

    def backward_began(self, backward: Backward) -> None:
        """A backward begins."""

    def backward_ended(self, backward: Backward) -> None:
        """A backward has ended, with all that ran inside it."""

    def optimizer_began(self, start_ns: int) -> None:
        """An optimizer's step begins."""

    def optimizer_ended(self, start_ns: int, end_ns: int, thread: int) -> None:
        """It has ended without an exception."""

    def failed(self, error: Exception, where: str) -> None:
        """The tracker met an internal error and has stopped; `where` is a module path."""

    def forked(self) -> None:
        """This process is a fork of the recorded one: let go of every file, write nothing."""


class Tap(Protocol):
    """Who looks at tensors as they come by. It never raises, unless the tracker is strict."""

    def returned(self, log: ThreadLog, place: Place, output: Any) -> None:
        """A call has returned something; its exit is the newest event of the thread's log."""

    def backward_begins(self, backward: Backward, outputs: Any) -> None:
        """A backward from some tensors is about to begin."""

    def optimizer_begins(self, optimizer: Any, has_closure: bool) -> None:
        """An optimizer, called by no other, is about to step."""

    def optimizer_ended(self, optimizer: Any, has_closure: bool) -> None:
        """It has stepped."""


#: Who hears of every call, and may raise what the user's hook raises: of its begin, with the module and its
#: positional arguments; of its end, with the keyword arguments and the output as well, {} and None when an exception
#: leaves it.
Entering = Callable[[ThreadLog, nn.Module, Any], None]
Leaving = Callable[[ThreadLog, nn.Module, Any, Any, Any], None]

#: Who hears of what an outermost call of a module has returned, just before its segment is closed.
Returning = Callable[[ThreadLog, Any], None]


class Subscribers:
    """The listeners of one tracker, and the guard around all our own work outside of the hot path."""

    def __init__(self, names: ModuleNames, remove_hooks: Callable[[], None]) -> None:
        self._names = names
        self._remove_hooks = remove_hooks
        self.has_failed = False
        self.listeners: list[Listener] = []
        self.taps: list[Tap] = []
        self.entering: list[Entering] = []
        self.leaving: list[Leaving] = []
        self.returning: list[Returning] = []
        self.strict_for: list[Listener] = []  # who wants internal errors raised

    @property
    def strict(self) -> bool:
        """Whether internal errors are raised, into the user's run."""
        return bool(self.strict_for)

    def guard(self, module: nn.Module | None) -> "_Guard":
        """Around all our own work outside of the hot path: an internal error ends the tracking, not the run."""
        return _Guard(self, module)

    def fail(self, error: Exception, module: nn.Module | None) -> None:
        """An observer does not stop the observed: tracking ends, the run goes on."""
        named = None if module is None else self._names.get(module)
        self._remove_hooks()
        self.has_failed = True  # who comes next starts another tracker
        for listener in list(self.listeners):
            listener.failed(error, named.shown if named is not None else "no module in particular")


class _Guard:
    """Keeps an internal error from the run. A class, because `contextmanager` takes 1.5 us and this 0.3."""

    __slots__ = ("_module", "_subscribers")

    def __init__(self, subscribers: Subscribers, module: nn.Module | None) -> None:
        self._subscribers = subscribers
        self._module = module

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> bool:
        if not isinstance(error, Exception):
            return False
        self._subscribers.fail(error, self._module)
        return not self._subscribers.strict
