"""Defines the events that a tracker passes to its listeners, and the guard around our own work for them."""

import threading
from collections.abc import Callable, Sequence
from typing import Any, ParamSpec

from torch import nn

from ...errors import NonFiniteError
from ..names.module_names import ModuleNames
from .call_context import CallContext
from .segments import Segment
from .thread_log import Backward, ThreadLog


class Listener:
    """Receives the events of a tracker. Only the methods that a listener overrides are called."""

    wants_backward_events = False  # True to receive the beginning and end of each call's backward
    wants_additions = False  # True to receive when the engine adds gradients

    # Events of outermost calls, backwards and optimizer steps.

    def segment_opened(self, segment: Segment, in_step: bool) -> None:
        """Receives an outermost call that begins.

        `in_step` is True if the call belongs to what is running, and so cannot start a step.
        """

    def segment_closed(self, segment: Segment) -> None:
        """Receives an outermost call that has ended."""

    def segment_dropped(self, segment: Segment) -> None:
        """Receives an outermost call that an interrupt kept from beginning; the listener may not know the segment."""

    def infers_shapes(self) -> None:
        """Receives that torch runs a module to learn shapes. What runs up to the next outermost call is no step's."""

    def backward_began(self, backward: Backward) -> None:
        """Receives a backward that begins, while its graph is whole."""

    def backward_ended(self, backward: Backward) -> None:
        """Receives a backward that has ended, with all that ran inside it."""

    def optimizer_began(self, start_ns: int) -> None:
        """Receives the beginning of an optimizer's step."""

    def optimizer_ended(self, start_ns: int, end_ns: int, thread: int) -> None:
        """Receives the end of an optimizer's step that raised no exception."""

    # Events with tensors. These methods never raise, unless the tracker is strict.

    def returned(self, log: ThreadLog, context: CallContext, output: Any) -> None:
        """Receives the output that a call has returned. The call's exit is the newest event of the thread's log."""

    def outermost_returned(self, log: ThreadLog, output: Any) -> None:
        """Receives the output of an outermost call of a module, just before its segment is closed."""

    def before_optimizer(self, optimizer: Any, has_closure: bool) -> None:
        """Receives an optimizer that is about to step, unless another optimizer calls it. Its time begins after this.

        It may raise `NonFiniteError`, which keeps the optimizer from stepping.
        """

    def closure_ended(self, optimizer: Any) -> None:
        """Receives an optimizer whose closure has returned for the first time in this step.

        The optimizer has changed nothing yet. The method may raise `NonFiniteError` to prevent it from doing so.
        """

    def after_optimizer(self, optimizer: Any, has_closure: bool) -> None:
        """Receives an optimizer that has stepped, unless another optimizer has called it."""

    # Events of every call. These methods may raise what a user's hook raises.

    def entering(self, log: ThreadLog, module: nn.Module, args: Any) -> None:
        """Receives a call that begins, with its positional arguments."""

    def leaving(
        self, log: ThreadLog, module: nn.Module, args: Any, kwargs: Any, output: Any, raised: bool
    ) -> None:
        """Receives a call that ends.

        If an exception ended it (`raised`), `output` is None and `kwargs` may be empty.
        """

    # Events of the tracker itself.

    def failed(self, error: Exception, where: str) -> None:
        """Receives the internal error after which the tracker has stopped; `where` is a module path."""

    def forked(self) -> None:
        """Receives a fork: this process is the child. The listener drops every file, and writes nothing."""


_P = ParamSpec("_P")

_EVENTS = tuple(name for name, value in vars(Listener).items() if callable(value))


class Subscribers:
    """The listeners of one tracker, with the guard around all our work outside of the hot path.

    For each event there is a list of bound methods, empty if no listener overrides the event, which is all that the hot
    path needs to check. The list objects never change, because the hooks hold them.
    """

    def __init__(self, names: ModuleNames, remove_hooks: Callable[[], None]) -> None:
        self._names = names
        self._remove_hooks = remove_hooks
        self.has_failed = False
        self._failing = threading.RLock()  # held while tracking fails, or a user is added
        #: The listeners for which the tracker runs, and whether each wants internal errors raised.
        self.users: dict[Listener, bool] = {}
        self.segment_opened: list[Callable[[Segment, bool], None]] = []
        self.segment_closed: list[Callable[[Segment], None]] = []
        self.segment_dropped: list[Callable[[Segment], None]] = []
        self.infers_shapes: list[Callable[[], None]] = []
        self.backward_began: list[Callable[[Backward], None]] = []
        self.backward_ended: list[Callable[[Backward], None]] = []
        self.optimizer_began: list[Callable[[int], None]] = []
        self.optimizer_ended: list[Callable[[int, int, int], None]] = []
        self.returned: list[Callable[[ThreadLog, CallContext, Any], None]] = []
        self.outermost_returned: list[Callable[[ThreadLog, Any], None]] = []
        self.before_optimizer: list[Callable[[Any, bool], None]] = []
        self.closure_ended: list[Callable[[Any], None]] = []
        self.after_optimizer: list[Callable[[Any, bool], None]] = []
        self.entering: list[Callable[[ThreadLog, nn.Module, Any], None]] = []
        self.leaving: list[Callable[[ThreadLog, nn.Module, Any, Any, Any, bool], None]] = []
        self.failed: list[Callable[[Exception, str], None]] = []
        self.forked: list[Callable[[], None]] = []

    def add_user(self, user: Listener, *, strict: bool) -> bool:
        """Adds a listener for which the tracker runs. Returns False, and adds nothing, if tracking has failed."""
        with self._failing:
            if self.has_failed:
                return False
            self.users[user] = strict
            self.add(user)
            return True

    def add(self, listener: Listener, *events: str, without: Sequence[str] = (), first: bool = False) -> None:
        """Calls the methods that a listener overrides from now on.

        Args:
            events: the only events to receive; all if none is given.
            without: events not to receive.
            first: whether to call the listener before the present ones.
        """
        # Ends are added before beginnings, as another thread may run in between and a lone end is harmless.
        for event in reversed(events or _EVENTS):
            if event not in without and getattr(type(listener), event) is not getattr(Listener, event):
                listed = getattr(self, event)
                listed.insert(0 if first else len(listed), getattr(listener, event))

    def remove(self, listener: Listener, *events: str) -> None:
        """Unsubscribes a listener from `events`, by default from all."""
        for event in events or _EVENTS:
            listed = getattr(self, event)
            listed[:] = [method for method in listed if method.__self__ is not listener]

    def clear(self) -> None:
        """Removes every listener."""
        self.users = {}
        for event in _EVENTS:
            getattr(self, event).clear()

    @property
    def strict(self) -> bool:
        """True if internal errors are raised into the user's run."""
        return any(list(self.users.values()))  # a copy, as other threads may add users

    def guard(self, module: nn.Module | None) -> "_Guard":
        """Returns a context manager for our own work outside of the hot path.

        Its errors end the tracking, not the run.
        """
        return _Guard(self, module)

    def fail(self, error: Exception, module: nn.Module | None) -> None:
        """Ends the tracking after an internal error, while the run goes on."""
        named = None if module is None else self._names.get(module)
        self._remove_hooks()
        with self._failing:
            self.has_failed = True  # the next user starts another tracker
            receivers = list(self.failed)
        for failed in receivers:
            failed(error, named.shown if named is not None else "no module in particular")


def notify_all(listeners: Sequence[Callable[_P, None]], *args: _P.args, **kwargs: _P.kwargs) -> None:
    """Calls the listeners of one event. A listener may add or remove listeners meanwhile."""
    for listener in tuple(listeners):
        listener(*args, **kwargs)


class _Guard:
    """Keeps internal errors out of the run, but lets a stop that the user requested pass.

    It is a class because `contextmanager` takes 1.5 us and this takes 0.3 us.
    """

    __slots__ = ("_module", "_subscribers")

    def __init__(self, subscribers: Subscribers, module: nn.Module | None) -> None:
        self._subscribers = subscribers
        self._module = module

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> bool:
        if not isinstance(error, Exception) or isinstance(error, NonFiniteError):
            return False
        self._subscribers.fail(error, self._module)
        return not self._subscribers.strict
