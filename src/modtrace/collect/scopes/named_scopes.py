"""Code that the user has named, and methods that run no hook: they stand in the log like calls."""

from types import FrameType
from typing import Any

from torch import nn

from ...torch_internals import graph_task_id
from ..log.call_context import Place
from ..log.thread_log import ThreadLog
from ..names.module_names import NamedModule
from .tracker import ScopeTracker


class OpenCode:
    """Code that runs: the calls that were opened for it, outermost first."""

    __slots__ = ("args", "kwargs", "log", "module", "places")

    def __init__(self, log: ThreadLog, module: nn.Module | None, args: Any, kwargs: Any) -> None:
        self.log = log
        self.module = module
        self.args = args
        self.kwargs = kwargs
        self.places: list[Place] = []


class NamedCode:
    """Opens and closes it in the tracker's logs.

    Inside a module, or with a module of its own, a scope is a call like any other. Alone at the outside it may last as
    long as the whole training, so there it is logged in stretches, from one outermost call to the next.
    """

    def __init__(self, tracker: ScopeTracker) -> None:
        self._tracker = tracker

    def enter(
        self, name: str, module: nn.Module | None, frame: FrameType | None, args: Any = (), kwargs: Any = None
    ) -> OpenCode:
        """A scope begins; where it has a module that does not run yet, a call of that begins too."""
        tracker = self._tracker
        code = OpenCode(tracker.logs.current, module, args, kwargs or {})
        try:
            self._enter(code, name, frame)
        except BaseException:  # an interrupt, or a hook of the user's
            self.leave(code, None, raised=True)
            raise
        return code

    def _enter(self, code: OpenCode, name: str, frame: FrameType | None) -> None:
        tracker, module = self._tracker, code.module
        named: NamedModule | None = None
        with tracker.subscribers.guard(module):
            self._prepare(code.log, frame)
            owner = self._owner() if module is None else tracker.names.find(module, None, frame)
            named = tracker.names.add_scope(name, owner)
            if module is not None and owner is not None and not _runs(code.log, owner):
                self._pause_if_in_stretch(code.log)
                self._opened(code, tracker.enter_module(code.log, module, frame))
        if code.places:
            self._tell_entered(code)
        with tracker.subscribers.guard(module):
            if named is not None:
                self._enter_scope(code, named, frame)

    def enter_call(
        self, module: nn.Module, frame: FrameType | None, args: Any, kwargs: Any
    ) -> OpenCode | None:
        """A `forward` begins that was not called through its module; None where it was."""
        tracker = self._tracker
        code = OpenCode(tracker.logs.current, module, args, kwargs)
        if code.log.place.outermost == id(module):
            return None
        try:
            with tracker.subscribers.guard(module):
                self._prepare(code.log, frame)
                self._pause_if_in_stretch(code.log)
                self._opened(code, tracker.enter_module(code.log, module, frame))
            if code.places:
                self._tell_entered(code)
        except BaseException:
            self.leave(code, None, raised=True)
            raise
        return code

    def leave(self, code: OpenCode, output: Any, *, raised: bool) -> None:
        """It has ended; `output` is what it returned, if that is known."""
        for place in reversed(code.places):
            self._leave_place(code, place, output, raised)

    def _prepare(self, log: ThreadLog, frame: FrameType | None) -> None:
        if log.place.named is not None:
            self._tracker.close_dead_calls(log, frame)

    def _pause_if_in_stretch(self, log: ThreadLog) -> None:
        if log.is_in_stretch:
            self._tracker.pause_stretch(log)

    def _enter_scope(self, code: OpenCode, named: NamedModule, frame: FrameType | None) -> None:
        log = code.log
        inside = log.place if log.place.named is not None else None
        with self._tracker.lock:
            place = self._tracker.tree.find_scope(named, inside)
        if (inside is None and graph_task_id() < 0) or log.is_in_stretch:
            log.scopes = [*log.scopes, place]
        self._tracker.enter_place(log, place, frame)
        self._opened(code, place)

    @staticmethod
    def _opened(code: OpenCode, place: Place) -> None:
        code.places.append(place)
        code.log.pinned.append(place)

    def _tell_entered(self, code: OpenCode) -> None:
        """Runs the user's hooks: a module's call has begun that torch runs none for."""
        assert code.module is not None
        code.log.given_kwargs = code.kwargs
        try:
            for hear in tuple(self._tracker.subscribers.entering):
                hear(code.log, code.module, code.args)
        finally:
            code.log.given_kwargs = None

    def _leave_place(self, code: OpenCode, place: Place, output: Any, raised: bool) -> None:
        tracker, log = self._tracker, code.log
        is_open = False
        with tracker.subscribers.guard(place.module):
            is_open = tracker.unwind_to(log, place.outermost)
            log.scopes = [each for each in log.scopes if each is not place]
        try:
            if is_open and not place.is_scope and code.module is not None:
                for hear in list(tracker.subscribers.leaving):
                    hear(log, code.module, code.args, code.kwargs, output)
        except BaseException:  # a user's hook
            output, raised = None, True
            raise
        finally:
            with tracker.subscribers.guard(place.module):
                log.pinned = [each for each in log.pinned if each is not place]
                if is_open and log.place is place:
                    tracker.leave(log, output, raised=raised)

    def _owner(self) -> NamedModule | None:
        """Whose the code is that a scope is opened in: of the call that runs, or is recomputed; None: of nobody."""
        log = self._tracker.logs.current
        if log.place.named is not None:
            return None if log.is_in_stretch else log.place.named
        call = self._tracker.where().call if graph_task_id() >= 0 else None
        return None if call is None else call.place.named


def _runs(log: ThreadLog, named: NamedModule) -> bool:
    """Whether a call of the module is open on the thread."""
    levels = [log.place, *(place for place, _, _ in log.suspended)]
    return any(place.named is named for level in levels for place in level.upwards())
