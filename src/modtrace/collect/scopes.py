"""Which module call is running, on every thread: exact, and cheap enough to leave on."""

import os
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any, NamedTuple, Protocol

import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from ..recording.phase import BACKWARD, RECOMPUTE
from ..torch_internals import (
    ACCUMULATE_SEQUENCE_NR,
    StopRecomputation,
    around_call,
    current_node,
    graph_task_id,
    is_compiled,
    is_custom_function,
    is_dynamo_compiling,
    is_in_optimizer_step,
    is_in_reentrant_checkpoint,
    keep_out_of_dynamo,
    running_module,
    running_modules,
    sequence_nr,
)
from .backward import Backward, BackwardWatcher
from .graph_watch import watch_graph
from .names import ModuleNames
from .recompute import classify
from .segments import EXIT, EXIT_RAISED, EXIT_UNSEEN, CallRef, Place, Segment
from .thread_log import ThreadLife, ThreadLog


class Listener(Protocol):
    """What a recorder hears. Events per outermost call, backward and optimizer step; never per call."""

    wants_backward_events: bool

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


class Where(NamedTuple):
    """What is running. `call` None: outside of any module, or unknown (`known` tells)."""

    call: CallRef | None
    phase: str | None
    known: bool = True
    parameter: str | None = None  # path of the parameter whose gradient is being accumulated
    accumulation: bool | None = None  # the engine adds gradients that meet; None: cannot tell without events


class ScopeTracker:
    """The one tracker of the process, shared by all recorders; made when the first comes, gone with the last."""

    def __init__(self) -> None:
        self.names = ModuleNames()
        self.names.on_death(self._forget_places)
        self.places: list[Place] = []  # by number
        self.outside = Place(0, None, None, -1)
        self.logs: list[ThreadLog] = []
        self._threads_seen = 0
        self.listeners: list[Listener] = []
        self.taps: list[Tap] = []
        self.strict = False
        self._next_id = 0
        self._outermost: dict[int, Place] = {}
        self._places_of: dict[int, list[Place]] = {}
        self._retired: dict[tuple[Place | None, int], Place] = {}
        self._threads = threading.local()  # itself, not a subclass: reading from one takes twice as long
        self._lock = threading.RLock()
        self._handles: list[Any] = []
        self._optimizer_starts: dict[int, list[int]] = {}
        self.backwards = BackwardWatcher(self)

    # Taking and giving back.

    def start(self) -> None:
        """Installs the hooks."""
        enter, leave = self._make_hooks()
        keep_out_of_dynamo(enter, leave, ScopeTracker._optimizer_begins, ScopeTracker._optimizer_ended)
        self._handles = [
            register_module_forward_pre_hook(enter),
            register_module_forward_hook(leave, always_call=True),
            register_optimizer_step_pre_hook(self._optimizer_begins),
            register_optimizer_step_post_hook(self._optimizer_ended),
        ]
        self.backwards.start()

    def stop(self) -> None:
        """Removes the hooks and closes what is open: a call whose end was not seen has none."""
        for handle in self._handles:
            handle.remove()
        self._handles = []
        self.backwards.stop()
        if self.log.place.named is not None:
            self._close_dead_calls(self.log, sys._getframe())
        for log in list(self.logs):
            while log.segment is not None:
                self._close_open_calls(log, EXIT_UNSEEN)
            for span in log.spans:
                for watch in getattr(span, "watches", ()):
                    alive = watch()
                    if alive is not None:
                        alive.remove()

    @property
    def log(self) -> ThreadLog:
        """The current thread's log."""
        try:
            log: ThreadLog = self._threads.log
        except AttributeError:
            with self._lock:
                self._threads.life = life = ThreadLife()
                log = self._threads.log = ThreadLog(
                    self.places, self.outside, self._threads_seen, weakref.ref(life)
                )
                self._threads_seen += 1
                self.logs = [each for each in self.logs if each.is_needed()] + [log]
        return log

    def take_ids(self, number: int) -> int:
        """The first of so many call ids that nobody else gets."""
        with self._lock:
            first = self._next_id
            self._next_id += number
        return first

    # The hot path. Measured on a shared 2-core machine, per module call: empty global hooks 1.9 us, these 2.7.

    def _make_hooks(self) -> tuple[Callable[..., None], Callable[..., None]]:
        threads = self._threads
        enter_slowly, leave_slowly = self._enter_slowly, self._leave_slowly
        clock, sequence, compiling = time.perf_counter_ns, sequence_nr, is_dynamo_compiling
        exit_event, taps = EXIT, self.taps

        def enter(module: nn.Module, args: Any) -> None:
            if compiling():
                return
            try:
                log = threads.log
            except AttributeError:  # the first call on this thread
                log = self.log
            place = log.place.get(id(module))
            if place is None:
                enter_slowly(log, module)
                return
            log.place = place
            log.seqs.append(sequence())
            log.places.append(place.index)
            log.times.append(clock())

        def leave(module: nn.Module, args: Any, output: Any) -> None:
            if compiling():
                return
            try:
                log = threads.log
            except AttributeError:
                return
            place = log.place
            if place.key != id(module) or output is None:
                leave_slowly(log, module, output)
                return
            log.seqs.append(sequence())
            log.places.append(exit_event)
            log.times.append(clock())
            log.place = place.above
            for tap in taps:
                tap.returned(log, place, output)

        return enter, leave

    # The slow path: outermost calls, modules not seen at this place before, exceptions.

    def _enter_slowly(self, log: ThreadLog, module: nn.Module) -> None:
        frame = sys._getframe(2)
        with self.guard(module):
            if log.place.named is not None:
                self._close_dead_calls(log, around_call(frame))
            if log.place.named is not None:
                with self._lock:
                    place = self._place(module, log.place, frame)
                log.place = place
                self._append(log, place.index)
            else:
                self._open_segment(log, module, frame)

    def _close_dead_calls(self, log: ThreadLog, frame: FrameType | None) -> None:
        """Closes the calls on the stack that no longer run: no hook tells of a KeyboardInterrupt."""
        levels = [place for place, _, _ in log.suspended] + [log.place]
        stack = [place.outermost for level in levels for place in reversed([*_upwards(level)])]
        alive = 0
        for key in running_modules(frame):
            if alive < len(stack) and stack[alive] == key:
                alive += 1
        for _ in range(len(stack) - alive):
            self._leave_call(log)

    def _leave_call(self, log: ThreadLog) -> None:
        """Closes the innermost call, which an exception has left."""
        if log.place.key < 0:
            self._close_open_calls(log, EXIT_RAISED)
        else:
            assert log.place.above is not None
            self._append(log, EXIT_RAISED)
            log.place = log.place.above

    def _open_segment(self, log: ThreadLog, module: nn.Module, frame: FrameType | None) -> None:
        with self._lock:
            place = self._place(module, None, frame)
        log.prune()
        task = graph_task_id()
        with_grad = torch.is_grad_enabled()
        segment = Segment(log, place, sequence_nr(), task, with_grad)
        segment.outer = log.segment
        if task >= 0:
            classify(segment, log, self.backwards, frame)
        elif not with_grad and is_in_reentrant_checkpoint(frame):
            segment.with_grad = True
        elsewhere = any(other.segment is not None for other in self.logs if other is not log)
        in_step = task >= 0 or log.segment is not None or elsewhere or self._in_optimizer_step(log, frame)
        try:
            for listener in list(self.listeners):
                listener.segment_opened(segment, in_step)
            log.push(segment)
            log.spans.append(segment)
            self._append(log, place.index)
        except BaseException:  # an interrupt: the call is not going to begin
            self._drop_segment(log, segment)
            raise

    def _drop_segment(self, log: ThreadLog, segment: Segment) -> None:
        if log.segment is segment:
            log.pop()
        log.spans = [span for span in log.spans if span is not segment]
        for listener in list(self.listeners):
            listener.segment_dropped(segment)

    def _leave_slowly(self, log: ThreadLog, module: nn.Module, output: Any) -> None:
        seq, now = sequence_nr(), time.perf_counter_ns()
        if log.segment is None:
            return
        with self.guard(module):
            frame = sys._getframe(2)
            if not self._unwind_to(log, module):
                return  # entered before us
            code = EXIT_RAISED if output is None and _is_raising(frame) else EXIT
            place = log.place
            self._append(log, code, seq, now)
            if code == EXIT:
                for tap in self.taps:
                    tap.returned(log, place, output)
            if place.key < 0:
                self._close_segment(log, output)
            else:
                assert place.above is not None
                log.place = place.above

    def _unwind_to(self, log: ThreadLog, module: nn.Module) -> bool:
        """Closes calls that ended without their hook, down to the open call of this module, if there is one."""
        key = id(module)
        if log.place.outermost == key:
            return True
        levels = [log.place, *(place for place, _, _ in reversed(log.suspended))]
        if not any(place.outermost == key for level in levels for place in _upwards(level)):
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
            self._append(log, code)
        self._close_segment(log, None)

    def _close_segment(self, log: ThreadLog, output: Any) -> None:
        segment = log.segment
        assert segment is not None
        first_id = self.take_ids(len(segment.places) // 2)
        segment.close(log.seqs[-1] if log.seqs else segment.first_seq, first_id)
        log.pop()
        if segment.task < 0 and output is not None:
            watch_graph(segment, output, self._graph_reached)
        if segment.last_seq == segment.first_seq and not segment.with_grad:
            log.spans = [span for span in log.spans if span is not segment]  # under no_grad nothing is kept
        for listener in list(self.listeners):
            listener.segment_closed(segment)

    @staticmethod
    def _append(log: ThreadLog, event: int, seq: int | None = None, now: int | None = None) -> None:
        log.seqs.append(sequence_nr() if seq is None else seq)
        log.places.append(event)
        log.times.append(time.perf_counter_ns() if now is None else now)

    def _graph_reached(self, segment: Segment) -> None:
        """Backward has come to a node that an outermost call returned."""
        with self.guard(None):
            self.backwards.reached(segment, self.log)

    # Places.

    def _place(self, module: nn.Module, above: Place | None, frame: FrameType | None) -> Place:
        key = id(module)
        known = self._outermost.get(key) if above is None else above.get(key)
        if known is not None:
            return known
        named = self.names.find(module, None if above is None else above.named, frame)
        place = self._retired.pop((above, named.module_id), None)
        if place is None:
            place = Place(key, named, above, len(self.places))
            self.places.append(place)
        place.outermost = key
        place.compiled = is_compiled(module)
        place.key = -1 if above is None else key
        (self._outermost if above is None else above)[key] = place
        self._places_of.setdefault(key, []).append(place)
        return place

    def _forget_places(self, key: int) -> None:
        for place in self._places_of.pop(key, ()):
            holder = self._outermost if place.above is None else place.above
            if holder.get(key) is place:
                del holder[key]
            assert place.named is not None
            self._retired[(place.above, place.named.module_id)] = place

    # Optimizers.

    def _optimizer_begins(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        if is_dynamo_compiling():
            return
        with self.guard(None):
            starts = self._optimizer_starts.setdefault(threading.get_ident(), [])
            if starts and not is_in_optimizer_step(sys._getframe(2)):
                starts.clear()  # the last one raised
            if not starts:
                for tap in list(self.taps):
                    tap.optimizer_begins(optimizer, _has_closure(args, kwargs))
            starts.append(time.perf_counter_ns())
            if len(starts) == 1:
                for listener in list(self.listeners):
                    listener.optimizer_began(starts[0])

    def _optimizer_ended(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        if is_dynamo_compiling():
            return
        now = time.perf_counter_ns()
        with self.guard(None):
            starts = self._optimizer_starts.get(threading.get_ident())
            if not starts:
                return
            start = starts.pop()
            if not starts:
                for tap in list(self.taps):
                    tap.optimizer_ended(optimizer, _has_closure(args, kwargs))
                for listener in list(self.listeners):
                    listener.optimizer_ended(start, now, self.log.number)

    def _in_optimizer_step(self, log: ThreadLog, frame: FrameType | None) -> bool:
        starts = self._optimizer_starts.get(threading.get_ident())
        if starts and not is_in_optimizer_step(frame):
            starts.clear()
        return bool(starts)

    # Asking.

    def where(self) -> Where:
        """What runs now on this thread, in forward, backward or recompute."""
        log = self.log
        task = graph_task_id()
        if log.segment is not None and log.task == task:
            return Where(CallRef(log.segment, _open_call(log.places)), log.segment.phase)
        if task < 0:
            return Where(None, None)
        return self._where_in_backward(log, task)

    def _where_in_backward(self, log: ThreadLog, task: int) -> Where:
        node = current_node()
        if node is None:
            return Where(None, BACKWARD)
        number = node._sequence_nr()
        if number == ACCUMULATE_SEQUENCE_NR:
            return Where(None, BACKWARD, parameter=self.names.parameter_name(node.variable))
        backward = self.backwards.running(log, task)
        owner = self.backwards.owner(log, task, node)
        if torch.is_grad_enabled() and backward is not None and not backward.create_graph:
            call = _recomputing_call(owner, node, sys._getframe(2))
            return Where(call, RECOMPUTE, known=call is not None)
        added = None if backward is None else backward.is_adding(number)
        if owner is None:
            return Where(None, BACKWARD, known=False, accumulation=added)
        span = owner.span_of(number)
        if span is not None:
            call = span.call_at(number)
            return Where(call, BACKWARD, known=call is not None, accumulation=added)
        return Where(self.backwards.recomputed_by(owner, backward, number), BACKWARD, accumulation=added)

    # Failure.

    def guard(self, module: nn.Module | None) -> "_Guard":
        """Around all our own work outside of the hot path: an internal error ends the tracking, not the run."""
        return _Guard(self, module)

    def fail(self, error: Exception, module: nn.Module | None) -> None:
        """An observer does not stop the observed: tracking ends, the run goes on."""
        named = None if module is None else self.names.get(module)
        for handle in self._handles:
            handle.remove()
        self._handles = []
        self.backwards.stop()
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


def _recomputing_call(owner: ThreadLog | None, node: Any, frame: FrameType | None) -> CallRef | None:
    """The forward call whose own ops a checkpoint is running again outside of any module's hooks.

    So it is where `forward` itself is checkpointed, as transformers does it.
    """
    call = None if owner is None else owner.call_of(node._sequence_nr())
    if is_custom_function(node):
        return call
    module = running_module(frame)
    while call is not None:
        ref = call.place.named.ref if call.place.named is not None else None
        if ref is not None and module is not None and ref() is module:
            return call
        call = call.parent
    return None


def _has_closure(args: Any, kwargs: Any) -> bool:
    """Whether `Optimizer.step` was given one; its arguments begin with the optimizer."""
    return (len(args) > 1 and args[1] is not None) or kwargs.get("closure") is not None


def _upwards(place: Place) -> Iterator[Place]:
    at: Place | None = place
    while at is not None and at.named is not None:
        yield at
        at = at.above


def _open_call(places: list[int]) -> int:
    """The number of the innermost open call of a running segment."""
    closed = 0
    for at in range(len(places) - 1, -1, -1):
        if places[at] < 0:
            closed += 1
        elif closed:
            closed -= 1
        else:
            return sum(1 for place in places[:at] if place >= 0)
    raise AssertionError("a running segment has an open call")


def _is_raising(call_frame: FrameType) -> bool:
    """Whether the hook runs because the call of this frame is being left by an exception.

    An exception that is merely being handled further out has another frame at the head of its traceback.
    """
    error = sys.exc_info()[1]
    if error is None or isinstance(error, StopRecomputation):
        return False
    return error.__traceback__ is not None and error.__traceback__.tb_frame is call_frame


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
        _current.strict = _current.strict or strict
        _current.backwards.events_wanted = any(each.wants_backward_events for each in _current.listeners)
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
        _current.backwards.events_wanted = any(each.wants_backward_events for each in _current.listeners)
        if not _current.listeners:
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
    for handle in tracker._handles:
        handle.remove()
    tracker.backwards.stop()
