"""Wraps the Python entry of the autograd engine, and tracks which backwards are running."""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch

from ...torch_internals.autograd import (
    ACCUMULATE_SEQUENCE_NR,
    EngineEntry,
    current_node,
    graph_task_id,
    queue_callback,
    sequence_nr,
)
from ...torch_internals.dynamo import is_dynamo_compiling, is_tracing, keep_out_of_dynamo
from ...torch_internals.gradients import backward_begins
from ...torch_internals.own_frames import leave_out_own_frames
from ..log.backward_span import BackwardSpan
from ..log.device_times import DeviceTimes
from ..log.listeners import Subscribers, notify_all
from ..log.segments import CallRef, Segment
from ..log.thread_log import Backward, NodeMark, ThreadLog, ThreadLogs
from .call_events import BackwardListener
from .call_hooks import CallHooks
from .graph_walk import root_nodes
from .graph_watch import GraphWatch
from .node_threads import NodeThreads, mark_made_by, mark_of

#: A function that closes the segments of a log above a given one, which were left without running their hooks.
CloseDownTo = Callable[[ThreadLog, Segment | None], None]


class BackwardWatcher:
    """Wraps the entry of the autograd engine for one tracker, and tracks which backwards are running."""

    def __init__(
        self,
        subscribers: Subscribers,
        logs: ThreadLogs,
        close_down_to: CloseDownTo,
        device_times: DeviceTimes,
    ) -> None:
        self._subscribers = subscribers
        self._device_times = device_times
        self._logs = logs
        self._close_down_to = close_down_to
        self._entry = EngineEntry()
        #: Those that run on any thread; the list is always the same, and other threads change it.
        self.all_running: list[Backward] = []
        self.threads = NodeThreads(logs)
        self.listeners: list[BackwardListener] = []

    def start(self) -> None:
        """Wraps torch's `_engine_run_backward`, through which every backward from Python goes."""
        keep_out_of_dynamo(
            CallHooks.plan, CallHooks.plan_learning, CallHooks._move_on, CallHooks._mark, CallHooks._finish
        )
        keep_out_of_dynamo(GraphWatch.__call__)
        keep_out_of_dynamo(BackwardWatcher._make, BackwardWatcher._begin, BackwardWatcher._end)
        keep_out_of_dynamo(BackwardWatcher._wrap, BackwardWatcher._run, with_callees=False)
        self._entry.wrap(self._wrap)

    def stop(self) -> None:
        """Restores `_engine_run_backward`."""
        self.threads.forget_unseen()
        self._entry.restore()

    def _wrap(self, original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def _engine_run_backward(t_outputs: Any, *args: Any, **kwargs: Any) -> Any:
            if is_dynamo_compiling() or not self._subscribers.users or is_tracing():
                return original(t_outputs, *args, **kwargs)
            try:
                return self._run(original, t_outputs, args, kwargs)
            except BaseException as error:
                leave_out_own_frames(error)
                raise

        return _engine_run_backward

    def _run(self, original: Callable[..., Any], outputs: Any, args: Any, kwargs: Any) -> Any:
        backward, hooks = self._make(args, kwargs)
        raised = True
        try:
            self._begin(backward, hooks, outputs)
            result = original(outputs, *args, **kwargs)
            raised = False
            if backward.marks_made and any(made_on is not backward.log for made_on in backward.spans):
                with self._subscribers.guard(None):
                    mark_made_by(backward, outputs, result)
            return result
        finally:
            self._end(backward, hooks, raised)

    def _make(self, args: Any, kwargs: Any) -> tuple[Backward, CallHooks]:
        log, task = self._logs.current, graph_task_id()
        if task < 0:  # else the thread may be one of the engine's own, which never ends
            backward_begins()
        outer = log.backward or (self.running(log, task) if task >= 0 else None)
        backward = Backward(log, outer, args, kwargs)
        return backward, CallHooks(
            backward, self._subscribers, self._logs, self._device_times, self.follow_on
        )

    def _begin(self, backward: Backward, hooks: CallHooks, outputs: Any) -> None:
        log = backward.log
        log.backward = backward
        backward.outputs = outputs
        log.context = self._logs.outside  # modules that the backward runs are not inside the open call
        self.all_running.append(backward)
        self.threads.forget_unseen()
        with self._subscribers.guard(None):
            if backward.create_graph and log.segment is None:
                log.open_gradient_span(backward, backward.first_seq)
            notify_all(self._subscribers.backward_began, backward)
            users = list(self._subscribers.users)
            times = any(user.wants_backward_events for user in users)
            additions = any(user.wants_additions for user in users)
            listeners = tuple(self.listeners)
            backward.marks_made = times or additions or bool(listeners)
            if backward.marks_made:
                if isinstance(outputs, torch.Tensor):
                    outputs = (outputs,)
                hooks.plan(outputs, self.makers, listeners, times=times, additions=additions)
            elif backward.create_graph or any(
                running.home is not backward.home for running in [*self.all_running]
            ):
                hooks.plan_learning(outputs)

    def _end(self, backward: Backward, hooks: CallHooks, raised: bool) -> None:
        log = backward.log
        log.backward = backward.outer_of_thread
        backward.outputs = backward.owners = None
        if backward in self.all_running:
            self.all_running.remove(backward)
        hooks.remove()
        began = backward.calls.began
        is_timed = bool(began) and began[-1] is not None
        backward.end(raised, self._device_times.record(began[-1].clock.device) if is_timed else None)
        with self._subscribers.guard(None):
            self._close_down_to(log, backward.segment)
            if raised:
                self._close_elsewhere(backward)
            if log.segment is backward.segment:
                log.context = backward.context
            if log in backward.spans:
                backward.spans[log].last_seq = sequence_nr()
            if backward.outer is not None:
                log.nested_end = sequence_nr()
            backward.first_id = self._logs.take_ids(len(backward.calls))
            notify_all(self._subscribers.backward_ended, backward)

    def _close_elsewhere(self, backward: Backward) -> None:
        """Closes calls that an interrupt has left open on the engine's own threads."""
        for log in self._logs.all:
            if log is not backward.log and log.segment is not None and log.task == backward.task >= 0:
                self._close_down_to(log, log.suspended[-1][2] if log.suspended else None)

    def is_running(self) -> bool:
        """Returns whether a backward runs on any thread."""
        return bool(self.all_running)

    def running(self, log: ThreadLog, task: int) -> Backward | None:
        """Returns the backward of a graph task; None if it did not come through the wrapped entry."""
        backward = self._find_running(log, task)
        if backward is not None and backward.create_graph:
            self.follow_on(log, backward)
        return backward

    def _find_running(self, log: ThreadLog, task: int) -> Backward | None:
        for backward in reversed([*self.all_running]):
            if backward.task == task:
                return backward
        if log.backward is not None and log.backward.task < 0:
            log.backward.task = task
            return log.backward
        # This is one of the engine's own threads, which has no log of the backward. A backward that has not run a node
        # yet does not know its task.
        unknown = [running for running in [*self.all_running] if running.task < 0]
        if len(unknown) > 1:
            node = current_node()
            begun = [candidate for candidate in unknown if node in root_nodes(candidate.outputs)]
            unknown = begun or [candidate for candidate in unknown if not candidate.learns_task]
        if len(unknown) == 1:
            unknown[0].task = task
            return unknown[0]
        return None

    def reached(self, segment: Segment, log: ThreadLog) -> None:
        """Records that the running backward has reached the outputs of a segment."""
        backward = self.running(log, graph_task_id())
        if backward is not None:
            backward.reached[segment] = None
            backward.reached_logs.add(segment.log)

    def recomputed_by(self, owner: ThreadLog, backward: Backward | None, number: int) -> CallRef | None:
        """Returns the call that owns a node made by a reentrant checkpoint's recompute outside of any module.

        Such nodes were made after the surrounding backward began. All other nodes outside of spans belong to no call.
        """
        if backward is None or owner is not backward.log or not backward.may_have_remade(number):
            return None
        return self.caller(backward)

    def caller(self, backward: Backward) -> CallRef | None:
        """Returns the call in whose backward a node runs this backward; None if there is none or it is not known."""
        node, outer = backward.inside, backward.outer
        number = ACCUMULATE_SEQUENCE_NR if node is None else node._sequence_nr()
        if outer is None or number == ACCUMULATE_SEQUENCE_NR:
            return None
        owner = self.threads.of(backward.log, outer.task, outer, node)
        return None if owner is None else owner.call_of(number) or self.recomputed_by(owner, outer, number)

    def owner(self, log: ThreadLog, task: int, node: Any) -> ThreadLog | None:
        """Returns the log of the thread that made a node of the running graph; None if that cannot be known."""
        return self.threads.of(log, task, self.running(log, task), node)

    def makers(self, backward: Backward, nodes: Sequence[Any]) -> Sequence[ThreadLog | None]:
        """Returns the log of the thread that made each node of a graph that runs; None where that cannot be known.

        The nodes are in the order in which they run. Unmarked nodes are attributed to the thread that made the first
        unmarked one, because no output of a call is below the nodes made inside it.
        """
        sole = self.threads.sole(backward.log, backward)
        if sole is not None:
            return [sole] * len(nodes)
        marks = [mark_of(node) for node in nodes]
        unmarked = next((node for node, mark in zip(nodes, marks, strict=True) if mark is None), None)
        owner = None if unmarked is None else self.threads.of(backward.log, backward.task, backward, unmarked)
        return [owner if mark is None else mark.log for mark in marks]

    def follow_on(self, log: ThreadLog, backward: Backward) -> None:
        """Opens a span for nodes that a backward makes (`create_graph`) on one of the engine's own threads."""
        if not backward.create_graph or log is backward.log or log in backward.spans:
            return
        span = log.open_gradient_span(backward, log.known_until())
        log.mark = log.mark or NodeMark(log)
        if backward.segment is not None:  # its nodes belong to the module whose forward called it
            span.asked_by = CallRef(backward.segment, backward.segment.open_calls.innermost)
        queue_callback(functools.partial(self._end_span, log, span, marks=backward.marks_made))

    def _end_span(self, log: ThreadLog, span: BackwardSpan, *, marks: bool) -> None:
        if self._logs.current is log:  # another thread may have run the last node
            span.last_seq = sequence_nr()
            if not marks:
                log.unmarked_seq = span.last_seq
