"""Watches the steps of optimizers on every thread."""

import functools
import sys
import threading
import time
from types import FrameType
from typing import Any

from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from ...torch_internals.call_frames import is_in_optimizer_step
from ...torch_internals.dynamo import is_dynamo_compiling, keep_out_of_dynamo
from ...torch_internals.unseen_steps import note_traced_step
from ..log.listeners import Subscribers, notify_all
from ..log.thread_log import ThreadLogs


class OptimizerWatch:
    """The two global optimizer hooks of the tracker."""

    def __init__(self, subscribers: Subscribers, logs: ThreadLogs) -> None:
        self._subscribers = subscribers
        self._logs = logs
        #: By thread, the start times of the running optimizers, outermost first.
        self.starts: dict[int, list[int]] = {}
        self._handles: list[Any] = []

    def start(self) -> None:
        """Installs the hooks."""
        keep_out_of_dynamo(OptimizerWatch._begins, OptimizerWatch._ended)
        self._handles = [
            register_optimizer_step_pre_hook(self._begins),
            register_optimizer_step_post_hook(self._ended),
        ]

    def stop(self) -> None:
        """Removes the hooks."""
        for handle in self._handles:
            handle.remove()
        self._handles = []

    def has_begun(self) -> bool:
        """Returns whether an optimizer's step began on this thread and may still run; this takes 0.1 us."""
        return bool(self.starts) and bool(self.starts.get(threading.get_ident()))

    def is_stepping(self, frame: FrameType | None) -> bool:
        """Returns whether an optimizer steps on this thread; `frame` is the innermost frame of the thread."""
        starts = self.starts.get(threading.get_ident())
        if starts and not is_in_optimizer_step(frame):
            starts.clear()  # the last optimizer raised, so its post hook did not run
        return bool(starts)

    def stepping_since(self, frame: FrameType | None) -> int:
        """Returns the start time in ns of the innermost optimizer step on this thread; -1 if there is none."""
        starts = self.starts.get(threading.get_ident())
        return starts[-1] if starts and self.is_stepping(frame) else -1

    def _begins(self, optimizer: Any, args: Any, kwargs: Any) -> Any:
        """Returns the arguments with which the optimizer continues; None keeps the original ones."""
        if is_dynamo_compiling():
            note_traced_step()
            return None
        with self._subscribers.guard(None):
            starts = self.starts.setdefault(threading.get_ident(), [])
            if starts and not is_in_optimizer_step(sys._getframe(2)):
                starts.clear()
            if not starts:
                notify_all(self._subscribers.before_optimizer, optimizer, _has_closure(args, kwargs))
            starts.append(time.perf_counter_ns())
            if len(starts) == 1:
                notify_all(self._subscribers.optimizer_began, starts[0])
                if self._subscribers.closure_ended and _has_closure(args, kwargs):
                    return self._with_watched_closure(optimizer, args, kwargs)
        return None

    def _with_watched_closure(self, optimizer: Any, args: Any, kwargs: Any) -> Any:
        """Returns the arguments with a closure that notifies listeners when it has returned for the first time."""
        closure = args[1] if len(args) > 1 else kwargs["closure"]
        is_first = True

        @functools.wraps(closure)
        def watched(*given: Any, **named: Any) -> Any:
            nonlocal is_first
            returned = closure(*given, **named)
            if is_first:
                is_first = False
                with self._subscribers.guard(None):
                    notify_all(self._subscribers.closure_ended, optimizer)
            return returned

        keep_out_of_dynamo(watched, with_callees=False)
        if len(args) > 1:
            return (args[0], watched, *args[2:]), kwargs
        return args, {**kwargs, "closure": watched}

    def _ended(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        if is_dynamo_compiling():
            return
        now = time.perf_counter_ns()
        with self._subscribers.guard(None):
            starts = self.starts.get(threading.get_ident())
            if not starts:
                return
            start = starts.pop()
            if not starts:
                notify_all(self._subscribers.after_optimizer, optimizer, _has_closure(args, kwargs))
                notify_all(self._subscribers.optimizer_ended, start, now, self._logs.current.number)


def _has_closure(args: Any, kwargs: Any) -> bool:
    """Returns whether `Optimizer.step` was given a closure. The first positional argument is the optimizer."""
    return (len(args) > 1 and args[1] is not None) or kwargs.get("closure") is not None
