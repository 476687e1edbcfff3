"""Which module call is running, on every thread: exact, and cheap enough to leave on."""

import os
import sys
import threading
import time
import weakref
from collections.abc import Callable
from types import FrameType
from typing import Any, Protocol

import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_pre_hook

from ...torch_internals import (
    StopRecomputation,
    around_call,
    graph_task_id,
    is_compilers_own,
    is_dynamo_compiling,
    is_in_custom_function,
    keep_out_of_dynamo,
    register_leave_hook,
    running_modules,
    sequence_nr,
)
from ..backward.call_tensors import CrossingRecorder
from ..backward.graph_watch import watch_graph
from ..backward.recompute import classify, find_around
from ..backward.watcher import Backward, BackwardWatcher
from ..log.call_context import Place, PlaceTree
from ..log.segments import EXIT, EXIT_RAISED, EXIT_UNSEEN, Segment
from ..log.step_data import Handover
from ..log.thread_log import ASIDE, ThreadLife, ThreadLog
from ..names.module_names import ModuleNames, NamedModule
from .locate import Where, where
from .named_scopes import NamedCode
from .optimizer_watch import OptimizerWatch


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


class ScopeTracker:
    """The one tracker of the process, shared by all recorders; made when the first comes, gone with the last."""

    def __init__(self) -> None:
        self.names = ModuleNames()
        self.tree = PlaceTree(self.names)
        self.logs: list[ThreadLog] = []
        self._threads_seen = 0
        self._started_on = (-1, -1)  # thread, and the number that its next node has
        self.listeners: list[Listener] = []
        self.taps: list[Tap] = []
        self.entering: list[Entering] = []
        self.leaving: list[Leaving] = []
        self.returning: list[Returning] = []
        self.strict_for: list[Listener] = []  # who wants internal errors raised
        self._next_id = 0
        self._threads = threading.local()  # itself, not a subclass: reading from one takes twice as long
        self.lock = threading.RLock()
        self._handles: list[Any] = []
        self._may_have_data = False  # the last outermost call was of a module without parameters
        self.optimizers = OptimizerWatch(self)
        self.backwards = BackwardWatcher(self)
        self.crossings = CrossingRecorder(self)
        self.named_code = NamedCode(self)

    # Taking and giving back.

    def start(self) -> None:
        """Installs the hooks."""
        enter, leave = self._make_hooks()
        keep_out_of_dynamo(enter, leave)
        self._handles = [
            register_module_forward_pre_hook(enter),
            register_leave_hook(leave),
        ]
        self.optimizers.start()
        self._started_on = (threading.get_ident(), sequence_nr())
        self.backwards.start()

    def stop(self) -> None:
        """Removes the hooks and closes what is open: a call whose end was not seen has none."""
        self.remove_hooks()
        if self.log.place.named is not None:
            self.close_dead_calls(self.log, sys._getframe())
        for log in list(self.logs):
            while log.segment is not None:
                self._close_open_calls(log, EXIT_UNSEEN)
            for span in log.spans:
                for watch in getattr(span, "watches", ()):
                    alive = watch()
                    if alive is not None:
                        alive.remove()

    @property
    def strict(self) -> bool:
        """Whether internal errors are raised, into the user's run."""
        return bool(self.strict_for)

    def remove_hooks(self) -> None:
        """Removes every hook and gives the engine's door back."""
        for handle in self._handles:
            handle.remove()
        self._handles = []
        self.optimizers.stop()
        self.backwards.stop()

    def where(self) -> Where:
        """What runs now on this thread, in forward, backward or recompute."""
        return where(self)

    @property
    def log(self) -> ThreadLog:
        """The current thread's log."""
        try:
            log: ThreadLog = self._threads.log
        except AttributeError:
            with self.lock:
                self._threads.life = life = ThreadLife()
                log = self._threads.log = ThreadLog(
                    self.tree.places, self.tree.outside, self._threads_seen, weakref.ref(life)
                )
                thread, number = self._started_on
                if thread == threading.get_ident():
                    log.forgotten_seq = number  # what has been made since is known
                self._threads_seen += 1
                self.logs = [each for each in self.logs if each.is_needed()] + [log]
        return log

    def running_segments(self) -> list[Segment]:
        """The outermost calls that run, on every thread."""
        levels = [segment for log in self.logs for _, _, segment in log.suspended]
        return levels + [log.segment for log in self.logs if log.segment is not None]

    def take_ids(self, number: int) -> int:
        """The first of so many call ids that nobody else gets."""
        with self.lock:
            first = self._next_id
            self._next_id += number
        return first

    # The hot path. Measured on a shared 2-core machine, per module call: empty global hooks 1.9 us, these 2.7.

    def _make_hooks(self) -> tuple[Callable[..., None], Callable[..., None]]:
        threads = self._threads
        enter_slowly, leave_slowly = self._enter_slowly, self._leave_slowly
        clock, sequence, compiling = time.perf_counter_ns, sequence_nr, is_dynamo_compiling
        exit_event, exit_raised, taps = EXIT, EXIT_RAISED, self.taps
        entering, leaving = self.entering, self.leaving

        def enter(module: nn.Module, args: Any) -> None:
            if compiling():
                return
            try:
                log = threads.log
            except AttributeError:  # the first call on this thread
                log = self.log
            place = log.place.get(id(module))
            if place is None or place.ref() is not module:  # 40 ns: the `id` of a dead module is used again
                if not enter_slowly(log, module):
                    return
            else:
                log.place = place
                log.seqs.append(sequence())
                log.places.append(place.index)
                log.times.append(clock())
            if entering:
                for hear in tuple(entering):  # a hook may register another, or take itself off
                    hear(log, module, args)

        def leave(module: nn.Module, args: Any, kwargs: Any, output: Any = None) -> None:
            if compiling():
                return
            try:
                log = threads.log
            except AttributeError:
                return
            place = log.place
            if place.key != id(module) or output is None:
                leave_slowly(log, module, args, kwargs, output)
                return
            if leaving:
                try:
                    for hear in tuple(leaving):
                        hear(log, module, args, kwargs, output)
                except BaseException:  # torch does not call us again for this call
                    log.seqs.append(sequence())
                    log.places.append(exit_raised)
                    log.times.append(clock())
                    log.place = place.above
                    raise
            log.seqs.append(sequence())
            log.places.append(exit_event)
            log.times.append(clock())
            log.place = place.above
            if taps:
                for tap in taps:
                    tap.returned(log, place, output)

        return enter, leave

    # The slow path: outermost calls, modules not seen at this place before, exceptions.

    def _enter_slowly(self, log: ThreadLog, module: nn.Module) -> bool:
        """Returns whether the call is one to follow."""
        if log.place is ASIDE:
            return False
        frame = sys._getframe(2)
        with self.guard(module):
            if is_compilers_own(module, frame, self._is_unknown_in_region(log, module)):
                return False
            if log.place.named is not None:
                self.close_dead_calls(log, around_call(frame))
            if log.is_in_stretch:
                self.named_code.pause(log)
            self.enter_module(log, module, frame)
        return True

    def _is_unknown_in_region(self, log: ThreadLog, module: nn.Module) -> bool:
        """Whether compiled code runs, and the module belongs to no model."""
        return any(place.compiled for place in log.place.upwards()) and self.names.get(module) is None

    def close_dead_calls(self, log: ThreadLog, frame: FrameType | None) -> None:
        """Closes the calls on the stack that no longer run: no hook tells of a KeyboardInterrupt."""
        levels = [place for place, _, _ in log.suspended] + [log.place]
        stack = [place for level in levels for place in reversed([*level.upwards()])]
        # What was opened without a hook ends by itself whatever happens: it lives, and all that is around it.
        alive = max((at + 1 for at, place in enumerate(stack) if place in log.pinned), default=0)
        for key in running_modules(frame):
            if alive < len(stack) and stack[alive].outermost == key:
                alive += 1
        for _ in range(len(stack) - alive):
            self._leave_call(log)

    def _leave_call(self, log: ThreadLog) -> None:
        """Closes the innermost call, which an exception has left."""
        if log.place.above is None:
            self._close_open_calls(log, EXIT_RAISED)
        else:
            self.append(log, EXIT_RAISED)
            log.place = log.place.above

    def _open_segment(self, log: ThreadLog, place: Place, frame: FrameType | None) -> None:
        log.prune()
        task = graph_task_id()
        with_grad = torch.is_grad_enabled()
        segment = Segment(log, place, sequence_nr(), task, with_grad)
        segment.outer = log.segment
        if task >= 0:
            classify(segment, log, self.backwards, frame)
            find_around(segment, log, frame)
        elif not with_grad and is_in_custom_function(frame):
            segment.with_grad = True
        if task < 0:
            segment.owners = place.owners = () if place.is_scope else self._owners(log, place, frame)
        elsewhere = any(other.is_in_module for other in self.logs if other is not log)
        in_step = task >= 0 or log.segment is not None or elsewhere or self.optimizers.is_stepping(frame)
        if not in_step and not place.is_scope:
            segment.handover = Handover(
                frame, has_parameters=bool(segment.named.parameters), is_after_data=self._may_have_data
            )
        try:
            for listener in list(self.listeners):
                listener.segment_opened(segment, in_step)
            log.push(segment)
            log.spans.append(segment)
            self.append(log, place.index)
        except BaseException:  # an interrupt: the call is not going to begin
            self._drop_segment(log, segment)
            raise

    def _drop_segment(self, log: ThreadLog, segment: Segment) -> None:
        if log.segment is segment:
            log.pop()
        log.spans = [span for span in log.spans if span is not segment]
        for listener in list(self.listeners):
            listener.segment_dropped(segment)

    def _leave_slowly(self, log: ThreadLog, module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        seq, now = sequence_nr(), time.perf_counter_ns()
        if log.segment is None or log.place is ASIDE:
            return
        is_open = False
        with self.guard(module):
            is_open = self.unwind_to(log, id(module))
        if not is_open:
            return  # entered before us
        raised = False
        if output is None and _is_leaving_by_exception(sys._getframe(2)):
            kwargs = {}  # torch (2.13) leaves them out then
            raised = not isinstance(sys.exc_info()[1], StopRecomputation)
        if self.leaving:
            try:
                for hear in tuple(self.leaving):
                    hear(log, module, args, kwargs, output)
            except BaseException:  # a user's hook: torch does not call us again for this call
                with self.guard(module):
                    self.leave(log, None, raised=True)
                raise
            seq, now = sequence_nr(), time.perf_counter_ns()
        with self.guard(module):
            self.leave(log, output, raised=raised, seq=seq, now=now)

    def leave(
        self, log: ThreadLog, output: Any, *, raised: bool, seq: int | None = None, now: int | None = None
    ) -> None:
        """Ends the innermost call."""
        place = log.place
        self.append(log, EXIT_RAISED if raised else EXIT, seq, now)
        if not raised and not place.is_scope:
            for tap in self.taps:
                tap.returned(log, place, output)
        if place.above is None:
            if not raised and not place.is_scope:
                for hear in self.returning:
                    hear(log, output)
            self.close_segment(log, output)
        else:
            log.place = place.above

    def unwind_to(self, log: ThreadLog, key: int) -> bool:
        """Closes calls that ended without their hook, down to the open one of this key, if there is one."""
        if log.place.outermost == key:
            return True
        levels = [log.place, *(place for place, _, _ in reversed(log.suspended))]
        if not any(place.outermost == key for level in levels for place in level.upwards()):
            return False
        while log.place.outermost != key:
            self._leave_call(log)
        return True

    def close_down_to(self, log: ThreadLog, segment: Segment | None) -> None:
        """Closes the segments above one that were left without their hooks."""
        while log.segment is not segment and log.segment is not None:
            self._close_open_calls(log, EXIT_RAISED)

    def _close_open_calls(self, log: ThreadLog, code: int) -> None:
        """Closes the running segment from outside: its calls are dead."""
        shortest = min(len(log.seqs), len(log.places), len(log.times))
        for events in (log.seqs, log.places, log.times):  # an interrupt may have come between two appends
            del events[shortest:]
        for _ in range(sum(1 if place >= 0 else -1 for place in log.places)):
            self.append(log, code)
        self.close_segment(log, None)

    def close_segment(self, log: ThreadLog, output: Any) -> None:
        segment = log.segment
        assert segment is not None
        first_id = self.take_ids(len(segment.places) // 2)
        segment.close(log.seqs[-1] if log.seqs else segment.first_seq, first_id)
        log.pop()
        if segment.handover is not None:
            self._may_have_data = not segment.named.parameters
            if self._may_have_data and output is not None:
                segment.handover.returned(output)
        if segment.task < 0 and output is not None:
            watch_graph(segment, output, self._graph_reached)
        if segment.last_seq == segment.first_seq and not segment.with_grad:
            log.spans = [span for span in log.spans if span is not segment]  # under no_grad nothing is kept
        for listener in list(self.listeners):
            listener.segment_closed(segment)
        if log.scopes and log.segment is None and not segment.place.is_scope:
            self.named_code.resume(log)

    @staticmethod
    def append(log: ThreadLog, event: int, seq: int | None = None, now: int | None = None) -> None:
        log.seqs.append(sequence_nr() if seq is None else seq)
        log.places.append(event)
        log.times.append(time.perf_counter_ns() if now is None else now)

    def _graph_reached(self, segment: Segment) -> None:
        """Backward has come to a node that an outermost call returned."""
        with self.guard(None):
            self.backwards.reached(segment, self.log)

    def enter_module(self, log: ThreadLog, module: nn.Module, frame: FrameType | None) -> Place:
        """A module's call begins, outermost or inside another."""
        inside = log.place if log.place.named is not None else None
        with self.lock:
            place = self.tree.find(module, inside, frame)
        self.enter_place(log, place, frame)
        return place

    def enter_place(self, log: ThreadLog, place: Place, frame: FrameType | None) -> None:
        """A call at a place begins."""
        if log.place.named is None:
            self._open_segment(log, place, frame)
        else:
            log.place = place
            self.append(log, place.index)

    def _owners(self, log: ThreadLog, place: Place, frame: FrameType | None) -> tuple[NamedModule, ...]:
        """What is around an outermost call and runs no hook: scopes, and modules one of whose methods runs it."""
        scopes = [each.named for each in log.scopes if each.named is not None]
        named = place.named
        assert named is not None
        owners = [] if named.root is named else self.names.owners_in(frame, named)
        return (*scopes, *owners)

    # Failure.

    def guard(self, module: nn.Module | None) -> "_Guard":
        """Around all our own work outside of the hot path: an internal error ends the tracking, not the run."""
        return _Guard(self, module)

    def fail(self, error: Exception, module: nn.Module | None) -> None:
        """An observer does not stop the observed: tracking ends, the run goes on."""
        named = None if module is None else self.names.get(module)
        self.remove_hooks()
        _abandon(self)
        for listener in list(self.listeners):
            listener.failed(error, named.shown if named is not None else "no module in particular")


class _Guard:
    """Keeps an internal error from the run. A class, because `contextmanager` takes 1.5 us and this 0.3."""

    __slots__ = ("_module", "_tracker")

    def __init__(self, tracker: ScopeTracker, module: nn.Module | None) -> None:
        self._tracker = tracker
        self._module = module

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> bool:
        if not isinstance(error, Exception):
            return False
        self._tracker.fail(error, self._module)
        return not self._tracker.strict


def _is_leaving_by_exception(call_frame: FrameType) -> bool:
    """Whether the hook runs because the call of this frame is being left by an exception.

    An exception that is merely being handled further out has another frame at the head of its traceback.
    """
    error = sys.exc_info()[1]
    trace = None if error is None else error.__traceback__
    return trace is not None and trace.tb_frame is call_frame


# One tracker a process.

_current: ScopeTracker | None = None
_current_lock = threading.RLock()
_fork_handler_registered = False


def acquire(listener: Listener, *, strict: bool = False) -> ScopeTracker:
    """Adds a listener to the process's tracker, which the first one starts."""
    global _current, _fork_handler_registered
    with _current_lock:
        if not _fork_handler_registered and hasattr(os, "register_at_fork"):  # Windows has no fork
            os.register_at_fork(after_in_child=_leave_to_parent)
            _fork_handler_registered = True
        if _current is None:
            tracker = ScopeTracker()
            tracker.start()
            _current = tracker
        _current.listeners.append(listener)
        if strict:
            _current.strict_for.append(listener)
        _tell_wishes(_current)
        return _current


def release(listener: Listener) -> None:
    """Takes a listener off; with the last one everything is put back as it was."""
    global _current
    with _current_lock:
        if _current is None or listener not in _current.listeners:
            return
        if len(_current.listeners) == 1:
            _current.stop()
        _current.listeners.remove(listener)
        _current.strict_for = [each for each in _current.strict_for if each is not listener]
        _tell_wishes(_current)
        if not _current.listeners:
            _current = None


def _tell_wishes(tracker: ScopeTracker) -> None:
    tracker.backwards.events_wanted = any(each.wants_backward_events for each in tracker.listeners)
    tracker.backwards.additions_wanted = any(each.wants_additions for each in tracker.listeners)


def _abandon(tracker: ScopeTracker) -> None:
    """A tracker has failed: who comes next starts another."""
    global _current
    with _current_lock:
        if _current is tracker:
            _current = None


def current() -> ScopeTracker | None:
    """The process's tracker, None while nobody records."""
    return _current


def _leave_to_parent() -> None:
    """In a forked child (a DataLoader's worker): the recording is the parent's."""
    global _current
    tracker, _current = _current, None
    if tracker is None:
        return
    for listener in tracker.listeners:
        listener.forked()
    tracker.listeners = []
    tracker.remove_hooks()
