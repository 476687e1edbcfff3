"""Logs code that the user named, and methods for which torch runs no hook, as calls."""

from types import FrameType
from typing import Any

from torch import nn

from ...torch_internals.autograd import graph_task_id
from ..log.call_context import CallContext
from ..log.listeners import notify_all
from ..log.thread_log import ThreadLog
from ..names.module_names import NamedModule
from .tracker import ScopeTracker


class OpenScope:
    """An open scope, with the contexts of the calls that were opened for it, outermost first."""

    __slots__ = ("args", "contexts", "kwargs", "log", "module")

    def __init__(self, log: ThreadLog, module: nn.Module | None, args: Any, kwargs: Any) -> None:
        self.log = log
        self.module = module
        self.args = args
        self.kwargs = kwargs
        self.contexts: list[CallContext] = []


class NamedScopes:
    """Opens and closes scopes in the tracker's logs.

    Inside a module, or with a module of its own, a scope is a call like any other. A scope outside of any module may
    last as long as the whole training. It is logged in pieces ("stretches"): one before, between and after the
    outermost calls that run meanwhile.
    """

    def __init__(self, tracker: ScopeTracker) -> None:
        self._tracker = tracker
        self.is_stopped = False  # after this, nothing is opened or closed

    def enter(
        self, name: str, module: nn.Module | None, frame: FrameType | None, args: Any = (), kwargs: Any = None
    ) -> OpenScope | None:
        """Begins a scope, and a call of its module unless one runs already. Returns None after the end."""
        if self.is_stopped:
            return None
        tracker = self._tracker
        scope = OpenScope(tracker.logs.current, module, args, kwargs or {})
        try:
            self._enter(scope, name, frame)
        except BaseException:  # an interrupt, or an error of a user's hook
            self.leave(scope, None, raised=True)
            raise
        return scope

    def _enter(self, scope: OpenScope, name: str, frame: FrameType | None) -> None:
        tracker, module = self._tracker, scope.module
        named: NamedModule | None = None
        with tracker.subscribers.guard(module):
            tracker.close_dead_calls(scope.log, frame)
            owner = self._owner() if module is None else tracker.names.find(module, None, frame)
            named = tracker.names.add_scope(name, owner)
            if module is not None and owner is not None and not _runs(scope.log, owner):
                tracker.pause_stretch(scope.log)
                self._opened(scope, tracker.enter_module(scope.log, module, frame))
        if scope.contexts:
            self._report_entered(scope)
        with tracker.subscribers.guard(module):
            if named is not None:
                self._enter_scope(scope, named, frame)

    def enter_call(
        self, module: nn.Module, frame: FrameType | None, args: Any, kwargs: Any
    ) -> OpenScope | None:
        """Begins the call of a `forward` that was not called through its module. Returns None if it was."""
        if self.is_stopped:
            return None
        tracker = self._tracker
        scope = OpenScope(tracker.logs.current, module, args, kwargs)
        if scope.log.context.outermost == id(module):
            return None
        try:
            with tracker.subscribers.guard(module):
                tracker.close_dead_calls(scope.log, frame)
                tracker.pause_stretch(scope.log)
                self._opened(scope, tracker.enter_module(scope.log, module, frame))
            if scope.contexts:
                self._report_entered(scope)
        except BaseException:
            self.leave(scope, None, raised=True)
            raise
        return scope

    def leave(self, scope: OpenScope | None, output: Any, *, raised: bool) -> None:
        """Ends a scope. `output` is the code's result, if it is known."""
        if scope is not None and not self.is_stopped:
            for context in reversed(scope.contexts):
                self._leave_context(scope, context, output, raised)

    def _enter_scope(self, scope: OpenScope, named: NamedModule, frame: FrameType | None) -> None:
        log = scope.log
        inside = log.context if log.context.named is not None else None
        with self._tracker.lock:
            context = self._tracker.tree.find_scope(named, inside)
        if (inside is None and graph_task_id() < 0) or log.is_in_stretch:
            log.scopes = [*log.scopes, context]
        self._tracker.enter_context(log, context, frame)
        self._opened(scope, context)

    @staticmethod
    def _opened(scope: OpenScope, context: CallContext) -> None:
        scope.contexts.append(context)
        scope.log.pinned.append(context)

    def _report_entered(self, scope: OpenScope) -> None:
        """Reports the beginning of a module's call for which torch runs no hook."""
        assert scope.module is not None
        scope.log.given_kwargs = scope.kwargs
        try:
            notify_all(self._tracker.subscribers.entering, scope.log, scope.module, scope.args)
        finally:
            scope.log.given_kwargs = None

    def _leave_context(self, scope: OpenScope, context: CallContext, output: Any, raised: bool) -> None:
        tracker, log = self._tracker, scope.log
        is_open = False
        with tracker.subscribers.guard(context.module):
            is_open = tracker.unwind_to(log, context.outermost)
            log.scopes = [other for other in log.scopes if other is not context]
        try:
            if is_open and not context.is_scope and scope.module is not None:
                leaving = tracker.subscribers.leaving
                notify_all(leaving, log, scope.module, scope.args, scope.kwargs, output, raised)
        except BaseException:  # an error of a user's hook
            output, raised = None, True
            raise
        finally:
            with tracker.subscribers.guard(context.module):
                log.pinned = [pinned for pinned in log.pinned if pinned is not context]
                if is_open and log.context is context:
                    tracker.leave(log, output, raised=raised)

    def _owner(self) -> NamedModule | None:
        """Returns the module in whose call a new scope is, even in a recompute; None outside of all modules."""
        log = self._tracker.logs.current
        if log.context.named is not None:
            return None if log.is_in_stretch else log.context.named
        call = self._tracker.where().call if graph_task_id() >= 0 else None
        return None if call is None else call.named


def _runs(log: ThreadLog, named: NamedModule) -> bool:
    """Returns whether a call of the module is open on the thread."""
    levels = [log.context, *(context for context, _, _ in log.suspended)]
    return any(context.named is named for level in levels for context in level.upwards())
