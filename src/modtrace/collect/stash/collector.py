"""Makes the stashes of one tracker: of outputs when calls end, of gradients when they arrive."""

import weakref
from collections.abc import Callable
from typing import Any, NamedTuple

from torch import nn

from ...recording.failure_reporter import warn_of_error
from ...recording.phase import BACKWARD
from ...torch_internals.dynamo import keep_out_of_dynamo
from ...torch_internals.graph_captures import graph_captures
from ...torch_internals.tensors import GradientHook
from ..log.listeners import Listener
from ..log.segments import CallRef, InsideCall
from ..log.thread_log import ThreadLog
from ..scopes import process
from ..scopes.tracker import ScopeTracker
from .gradients import Arriving, OutputGradients, Returned
from .inside import InsideOutputs
from .stash import Event, Stash, StashFn
from .steps import StashSteps


class Registered(NamedTuple):
    """A registered module, and the name of its stashes."""

    module: "weakref.ref[nn.Module]"
    type: type[nn.Module]
    name: str
    grad: bool


class StashCollector(Listener):
    """Makes stashes while a module is registered, as a listener of the process's tracker.

    Exceptions of the stash function propagate to the caller of the module or of `backward()`.
    """

    def __init__(
        self, stash: StashFn, stashes: Callable[[], list[Stash]], *, strict: bool, inside: bool
    ) -> None:
        """Creates a collector, which stashes nothing before a module is registered.

        Args:
            stashes: returns the list to which stashes are added.
            inside: whether outputs of modules inside of compiled code are stashed.
        """
        self.steps = StashSteps()
        self._stash = stash
        self._stashes = stashes
        self._strict = strict
        self._is_inside_wanted = inside
        self._registered: dict[int, list[Registered]] = {}  # keyed by the `id` of the module
        self._tracker: ScopeTracker | None = None  # set while it listens
        self._gradients: OutputGradients | None = None
        self._inside: InsideOutputs | None = None

    @property
    def registered(self) -> list[Registered]:
        """All registered modules; a module with several names occurs once for each."""
        return [registered for listed in self._registered.values() for registered in listed]

    def register(self, module: nn.Module, name: str, grad: bool) -> None:
        """Stashes the outputs of a module from now on."""
        if self._tracker is None and not self._registered:
            self._start()
        registered = Registered(weakref.ref(module), type(module), name, grad)
        self._registered[id(module)] = [*self._registered_as(module), registered]
        if self._inside is not None:
            self._inside.tap(module)

    def _registered_as(self, module: nn.Module) -> list[Registered]:
        return [
            registered for registered in self._registered.get(id(module), ()) if registered.module() is module
        ]

    def stop(self) -> None:
        """Removes all of our hooks."""
        self._registered = {}
        tracker, self._tracker = self._tracker, None
        if tracker is not None:
            self._release(tracker)
            self.steps.stop()
        process.release(self)

    def _start(self) -> None:
        keep_out_of_dynamo(StashCollector._wait_for, OutputGradients._take)
        keep_out_of_dynamo(StashCollector.leaving, StashCollector._keep, with_callees=False)
        keep_out_of_dynamo(
            GradientHook.__call__, OutputGradients._arrived, OutputGradients._pass_on, with_callees=False
        )
        keep_out_of_dynamo(StashCollector._gradients_came, OutputGradients._finish, with_callees=False)
        try:
            tracker = process.acquire(self, strict=self._strict)
            self._tracker = tracker
            graph_captures.watch(self)
            self._gradients = OutputGradients(tracker, self._gradients_came, lambda: len(self._stashes()))
            tracker.subscribers.add(self._gradients)
            if self._is_inside_wanted:
                self._inside = InsideOutputs(tracker, self._gradients, self._returned_inside)
            self.steps = StashSteps(tracker.backwards.is_running)
            self.steps.start(tracker.subscribers, tracker.running_segments)
        except BaseException:
            self.stop()
            raise

    def _release(self, tracker: ScopeTracker) -> None:
        graph_captures.unwatch(self)
        tracker.subscribers.remove(self, "leaving")
        inside, self._inside = self._inside, None
        if inside is not None:
            inside.stop()
        gradients, self._gradients = self._gradients, None
        if gradients is not None:
            gradients.stop()
            tracker.subscribers.remove(gradients)

    # Making stashes.

    def leaving(
        self, log: ThreadLog, module: nn.Module, args: Any, kwargs: Any, output: Any, raised: bool
    ) -> None:
        if id(module) not in self._registered or raised:
            return
        segment = log.segment
        assert segment is not None
        call = CallRef(segment, segment.open_calls.innermost)
        of_module = self._registered_as(module)
        for registered in of_module:
            self._keep(registered, call, False, output, args, kwargs)
        with_gradient = [registered for registered in of_module if registered.grad]
        if with_gradient:
            self._wait_for(with_gradient, call, output)

    def _returned_inside(self, module: nn.Module, call: InsideCall, output: Any) -> list[Registered] | None:
        of_module = self._registered_as(module)
        for registered in of_module:
            self._keep(registered, call, False, output, (), {})
        return [registered for registered in of_module if registered.grad] or None

    def _wait_for(self, registered: list[Registered], call: CallRef, output: Any) -> None:
        tracker, gradients = self._tracker, self._gradients
        if tracker is not None and gradients is not None:
            with tracker.subscribers.guard(registered[0].module()):
                gradients.wait_for(registered, call, output)

    def _gradients_came(self, returned: Returned, value: tuple[Any, ...], arriving: Arriving | None) -> None:
        for registered in returned.registered:
            self._keep(registered, returned.call, True, value, (), {}, arriving)

    def _keep(
        self,
        registered: Registered,
        call: CallRef | InsideCall,
        grad: bool,
        value: Any,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        arriving: Arriving | None = None,
    ) -> None:
        tracker = self._tracker
        if tracker is None:
            return
        phase = BACKWARD if grad else call.segment.phase
        step, nth = None, None
        with tracker.subscribers.guard(registered.module()):
            step, nth = self.steps.count(call)
        event = Event(registered.name, registered.type, grad, value, args, kwargs, step, phase, nth)
        stash = self._stash(event)
        if isinstance(stash, Stash):
            self._label(stash, event, call)
        stashes = self._stashes()
        at = len(stashes)
        if arriving is not None and self._gradients is not None:
            at = self._gradients.make_room(arriving)
        stashes.insert(at, stash)

    def _label(self, stash: Stash, event: Event, call: CallRef | InsideCall) -> None:
        if stash.phase is None:
            stash.step, stash.phase, stash.call = event.step, event.phase, event.call
        if (stash.step, stash.call) == (event.step, event.call):  # the user may have set others
            self.steps.follow(stash, call)

    # Events of the process's tracker.

    def failed(self, error: Exception, where: str) -> None:
        tracker, self._tracker = self._tracker, None
        if tracker is None:
            return
        self._release(tracker)
        if not self._strict:
            text = f"{where}: modtrace met an internal error and stashes nothing more; the run goes on"
            warn_of_error(text, error, strict="track(strict=True)")

    def forked(self) -> None:
        self._tracker = None
