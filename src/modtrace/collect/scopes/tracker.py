"""Tracks which module call is running on every thread, cheaply enough to be left on."""

import functools
import sys
import threading
import time
from collections.abc import Callable
from types import FrameType
from typing import Any

import torch
from torch import nn

from ...torch_internals.autograd import graph_task_id, is_in_custom_function, sequence_nr
from ...torch_internals.call_frames import PipelineChunk, around_call, find_pipeline_chunk, running_modules
from ...torch_internals.checkpoint import StopRecomputation
from ...torch_internals.dynamo import is_compilers_own, is_dynamo_compiling, keep_out_of_dynamo
from ...torch_internals.modules import GlobalHooks
from ..backward.call_tensors import CallTensorRecorder
from ..backward.graph_watch import watch_graph
from ..backward.recompute import classify, find_around
from ..backward.watcher import BackwardWatcher
from ..log.call_context import CallContext, ContextTree
from ..log.device_times import DeviceTimes
from ..log.listeners import Subscribers, notify_all
from ..log.segments import EXIT, EXIT_RAISED, EXIT_UNSEEN, Segment
from ..log.step_data import Handover
from ..log.thread_log import ASIDE, ThreadLog, ThreadLogs
from ..names.module_names import ModuleNames, NamedModule
from .locate import locate
from .optimizer_watch import OptimizerWatch


class ScopeTracker:
    """The tracker that all recorders of the process share; see `process.acquire`."""

    def __init__(self) -> None:
        self.names = ModuleNames()
        self.tree = ContextTree(self.names)
        self.lock = threading.RLock()  # guards the context tree
        self.logs = ThreadLogs(self.tree)
        self.subscribers = Subscribers(self.names, self.remove_hooks)
        self._hooks: GlobalHooks | None = None  # set while it runs
        self._may_have_data = False  # whether the last outermost call was of a module without parameters
        self.optimizers = OptimizerWatch(self.subscribers, self.logs)
        self.device_times = DeviceTimes(self.subscribers)
        self.backwards = BackwardWatcher(self.subscribers, self.logs, self.close_down_to, self.device_times)
        self.call_tensors = CallTensorRecorder(self.subscribers)
        #: Returns what runs now on this thread; a `partial` adds no Python frame.
        self.where = functools.partial(
            locate, self.logs, self.backwards, self.optimizers, self.close_dead_calls
        )

    # Starting and stopping.

    def start(self) -> None:
        """Installs the hooks."""
        enter, leave = self._make_hooks()
        keep_out_of_dynamo(enter, leave)
        self._hooks = GlobalHooks(enter, leave)
        self.optimizers.start()
        self.logs.start()
        self.backwards.start()

    def stop(self) -> None:
        """Removes the hooks, and closes open calls, which have no end in the tables."""
        self.remove_hooks()
        log = self.logs.current
        self.close_dead_calls(log, sys._getframe())
        for log in list(self.logs.all):
            while log.segment is not None:
                self._close_open_calls(log, EXIT_UNSEEN)
            if log.mark is not None:
                log.mark.log = None  # graphs refer to the mark
            for span in log.spans:
                for watch in getattr(span, "watches", ()):
                    alive = watch()
                    if alive is not None:
                        alive.remove()

    def remove_hooks(self) -> None:
        """Removes every hook, and unwraps the entry of the autograd engine."""
        if self._hooks is not None:
            self._hooks.remove()
        self._hooks = None
        self.optimizers.stop()
        self.backwards.stop()

    def running_segments(self) -> list[Segment]:
        """Returns the outermost calls that run on every thread."""
        levels = [segment for log in self.logs.all for _, _, segment in log.suspended]
        return levels + [log.segment for log in self.logs.all if log.segment is not None]

    # The hot path. On a shared 2-core machine, empty global hooks take 1.9 us a module call, these 2.7 us.

    def _make_hooks(self) -> tuple[Callable[..., None], Callable[..., None]]:
        threads, subscribers = self.logs.threads, self.subscribers
        enter_slowly, leave_slowly = self._enter_slowly, self._leave_slowly
        logs = self.logs
        clock, sequence, compiling = time.perf_counter_ns, sequence_nr, is_dynamo_compiling
        exit_event, exit_raised, returned = EXIT, EXIT_RAISED, subscribers.returned
        entering, leaving = subscribers.entering, subscribers.leaving

        def enter(module: nn.Module, args: Any) -> None:
            if compiling():
                return
            try:
                log = threads.log
            except AttributeError:  # the thread has no log before its first call
                log = logs.current
            context = log.context.get(id(module))
            # `ref` takes 40 ns, but a new module may have the `id` of a freed one.
            if context is None or context.ref() is not module:
                if not enter_slowly(log, module):
                    return
            else:
                log.context = context
                log.seqs.append(sequence())
                log.contexts.append(context.index)
                log.times.append(clock())
            if entering:
                for notify in tuple(entering):  # a copy, as a hook may register or remove one
                    notify(log, module, args)

        def leave(module: nn.Module, args: Any, kwargs: Any, output: Any = None) -> None:
            if compiling():
                return
            try:
                log = threads.log
            except AttributeError:
                return
            context = log.context
            if context.key != id(module) or output is None:
                leave_slowly(log, module, args, kwargs, output)
                return
            if leaving:
                try:
                    for notify in tuple(leaving):
                        notify(log, module, args, kwargs, output, False)
                except BaseException:  # torch does not run our exit hook for this call
                    log.seqs.append(sequence())
                    log.contexts.append(exit_raised)
                    log.times.append(clock())
                    log.context = context.above
                    raise
            log.seqs.append(sequence())
            log.contexts.append(exit_event)
            log.times.append(clock())
            log.context = context.above
            if returned:
                for notify_returned in returned:
                    notify_returned(log, context, output)

        return enter, leave

    # The slow path, for outermost calls, modules that are new in a context, and exceptions.

    def _enter_slowly(self, log: ThreadLog, module: nn.Module) -> bool:
        """Begins a call. Returns whether the call is logged."""
        if log.context is ASIDE:
            return False
        frame = sys._getframe(2)
        with self.subscribers.guard(module):
            if is_compilers_own(module, frame, self._is_unknown_in_region(log, module)):
                return False
            chunk = find_pipeline_chunk(frame) if log.context.named is None else None
            if chunk is not None and chunk.micro_batch is None:
                notify_all(self.subscribers.infers_shapes)
                return False
            self.close_dead_calls(log, around_call(frame))
            self.pause_stretch(log)
            self.enter_module(log, module, frame, chunk)
        return True

    def _is_unknown_in_region(self, log: ThreadLog, module: nn.Module) -> bool:
        """Returns whether compiled code runs and the module belongs to no model."""
        return any(context.compiled for context in log.context.upwards()) and self.names.get(module) is None

    def close_dead_calls(self, log: ThreadLog, frame: FrameType | None) -> None:
        """Closes the calls on the stack that no longer run. No hook runs when a KeyboardInterrupt leaves a call."""
        if log.context.named is None:
            return
        levels = [context for context, _, _ in log.suspended] + [log.context]
        stack = [context for level in levels for context in reversed([*level.upwards()])]
        # A call opened without a hook always ends by itself, so it still runs, with all calls around it.
        alive = max((at + 1 for at, context in enumerate(stack) if context in log.pinned), default=0)
        for key in running_modules(frame):
            if alive < len(stack) and stack[alive].outermost == key:
                alive += 1
        for _ in range(len(stack) - alive):
            self._leave_call(log)

    def _leave_call(self, log: ThreadLog) -> None:
        """Closes the innermost call, which ended with an exception."""
        if log.context.above is None:
            self._close_open_calls(log, EXIT_RAISED)
        else:
            self.append(log, EXIT_RAISED)
            log.context = log.context.above

    def _open_segment(
        self, log: ThreadLog, context: CallContext, frame: FrameType | None, chunk: PipelineChunk | None
    ) -> None:
        log.prune()
        task = graph_task_id()
        with_grad = torch.is_grad_enabled()
        segment = Segment(log, context, sequence_nr(), task, with_grad)
        segment.outer, segment.chunk = log.segment, chunk
        if task >= 0:
            classify(segment, log, self.backwards, frame)
            find_around(segment, log, frame)
        elif not with_grad and is_in_custom_function(frame):
            segment.with_grad = True
        if task < 0:
            segment.owners = context.owners = () if context.is_scope else self._owners(log, context, frame)
        elsewhere = any(
            other.is_in_module and (with_grad or not other.is_running(segment.named.module_id))
            for other in self.logs.all
            if other is not log
        )
        in_step = task >= 0 or log.segment is not None or elsewhere or self.optimizers.is_stepping(frame)
        if not in_step and not context.is_scope:
            segment.handover = Handover(
                frame, has_parameters=bool(segment.named.parameters), is_after_data=self._may_have_data
            )
        try:
            notify_all(self.subscribers.segment_opened, segment, in_step)
            log.push(segment)
            log.spans.append(segment)
            self.append(log, context.index)
        except BaseException:  # an interrupt prevents the call from beginning
            self._drop_segment(log, segment)
            raise

    def _drop_segment(self, log: ThreadLog, segment: Segment) -> None:
        if log.segment is segment:
            log.pop()
        log.spans = [span for span in log.spans if span is not segment]
        notify_all(self.subscribers.segment_dropped, segment)

    def _leave_slowly(self, log: ThreadLog, module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        seq, now = sequence_nr(), time.perf_counter_ns()
        if log.segment is None or log.context is ASIDE:
            return
        is_open = False
        with self.subscribers.guard(module):
            is_open = self.unwind_to(log, id(module))
        if not is_open:
            return  # the call began before the hooks were installed
        raised = output is None and _is_leaving_by_exception(sys._getframe(2))
        if raised:
            kwargs = {}  # torch (2.13) omits them in this case
        if self.subscribers.leaving:
            try:
                notify_all(self.subscribers.leaving, log, module, args, kwargs, output, raised)
            except BaseException:  # an error of a user's hook: torch does not call us again for this call
                with self.subscribers.guard(module):
                    self.leave(log, None, raised=True)
                raise
            seq, now = sequence_nr(), time.perf_counter_ns()
        raised = raised and not isinstance(sys.exc_info()[1], StopRecomputation)
        with self.subscribers.guard(module):
            self.leave(log, output, raised=raised, seq=seq, now=now)

    def leave(
        self, log: ThreadLog, output: Any, *, raised: bool, seq: int | None = None, now: int | None = None
    ) -> None:
        """Ends the innermost call."""
        context = log.context
        self.append(log, EXIT_RAISED if raised else EXIT, seq, now)
        if not raised and not context.is_scope:
            notify_all(self.subscribers.returned, log, context, output)
        if context.above is None:
            if not raised and not context.is_scope:
                notify_all(self.subscribers.outermost_returned, log, output)
            self.close_segment(log, output)
        else:
            log.context = context.above

    def unwind_to(self, log: ThreadLog, key: int) -> bool:
        """Closes calls whose hook never ran, down to the call of the module whose `id` is `key`.

        Returns False if that module has no open call.
        """
        if log.context.outermost == key:
            return True
        levels = [log.context, *(context for context, _, _ in reversed(log.suspended))]
        if not any(context.outermost == key for level in levels for context in level.upwards()):
            return False
        while log.context.outermost != key:
            self._leave_call(log)
        return True

    def close_down_to(self, log: ThreadLog, segment: Segment | None) -> None:
        """Closes the segments above `segment`, which were left without running their hooks."""
        while log.segment is not segment and log.segment is not None:
            self._close_open_calls(log, EXIT_RAISED)

    def _close_open_calls(self, log: ThreadLog, code: int) -> None:
        """Closes the running segment, whose calls ended without running their hooks."""
        shortest = min(len(log.seqs), len(log.contexts), len(log.times))
        for events in (log.seqs, log.contexts, log.times):  # an interrupt may have come between two appends
            del events[shortest:]
        is_elsewhere = log is not self.logs.current  # an interrupt left it open on an engine thread
        seq = log.seqs[-1] if is_elsewhere and log.seqs else None
        for _ in range(sum(1 if event >= 0 else -1 for event in log.contexts)):
            self.append(log, code, seq)
        self.close_segment(log, None)

    def close_segment(self, log: ThreadLog, output: Any) -> None:
        segment = log.segment
        assert segment is not None
        first_id = self.logs.take_ids(len(segment.contexts) // 2)
        segment.close(log.seqs[-1] if log.seqs else segment.first_seq, first_id)
        log.pop()
        if segment.handover is not None:
            self._may_have_data = not segment.named.parameters
            if self._may_have_data and output is not None:
                segment.handover.returned(output)
        if segment.task < 0 and output is not None:
            watch_graph(segment, output, self._graph_reached)
        if segment.last_seq == segment.first_seq and not segment.with_grad:
            log.spans = [span for span in log.spans if span is not segment]  # it has no graph under no_grad
        notify_all(self.subscribers.segment_closed, segment)
        if log.scopes and log.segment is None and not segment.context.is_scope:
            for context in log.scopes:  # the scopes that this call interrupted
                self.enter_context(log, context, None)

    @staticmethod
    def append(log: ThreadLog, event: int, seq: int | None = None, now: int | None = None) -> None:
        log.seqs.append(sequence_nr() if seq is None else seq)
        log.contexts.append(event)
        log.times.append(time.perf_counter_ns() if now is None else now)

    def _graph_reached(self, segment: Segment) -> None:
        """Records that backward has reached an output node of an outermost call."""
        with self.subscribers.guard(None):
            self.backwards.reached(segment, self.logs.current)

    def enter_module(
        self, log: ThreadLog, module: nn.Module, frame: FrameType | None, chunk: PipelineChunk | None = None
    ) -> CallContext:
        """Begins the call of a module, and returns its context; `chunk` is what a stage of a pipeline runs in it."""
        inside = log.context if log.context.named is not None else None
        with self.lock:
            context = self.tree.find(module, inside, frame)
        self.enter_context(log, context, frame, chunk)
        return context

    def enter_context(
        self,
        log: ThreadLog,
        context: CallContext,
        frame: FrameType | None,
        chunk: PipelineChunk | None = None,
    ) -> None:
        """Logs the beginning of a call. Opens a new segment if no call is running."""
        if log.context.named is None:
            self._open_segment(log, context, frame, chunk)
        else:
            log.context = context
            self.append(log, context.index)

    def pause_stretch(self, log: ThreadLog) -> None:
        """Closes the calls of scopes outside of any module, because a module call begins; see `NamedScopes`."""
        if log.is_in_stretch:
            for _ in log.scopes:
                self.append(log, EXIT)
            self.close_segment(log, None)

    def _owners(
        self, log: ThreadLog, context: CallContext, frame: FrameType | None
    ) -> tuple[NamedModule, ...]:
        """Returns what surrounds an outermost call without a hook: named scopes, and modules whose method calls
        it.
        """
        scopes = [scope.named for scope in log.scopes if scope.named is not None]
        named = context.named
        assert named is not None
        owners = [] if named.root is named else self.names.owners_in(frame, named)
        return (*scopes, *owners)


def _is_leaving_by_exception(call_frame: FrameType) -> bool:
    """Returns whether the hook runs because an exception leaves the call of this frame.

    If an exception is only being handled further out, its traceback begins with another frame.
    """
    error = sys.exc_info()[1]
    trace = None if error is None else error.__traceback__
    return trace is not None and trace.tb_frame is call_frame
