"""Wraps the Python entry of the autograd engine, and knows which backwards are running."""

import functools
from collections.abc import Callable
from typing import Any

import torch

from ...torch_internals.autograd import EngineEntry, graph_task_id, queue_callback, sequence_nr
from ...torch_internals.dynamo import is_dynamo_compiling, is_tracing, keep_out_of_dynamo
from ..log.device_times import DeviceTimes
from ..log.listeners import Subscribers, tell_all
from ..log.segments import BackwardSpan, CallRef, Segment
from ..log.thread_log import Backward, ThreadLog, ThreadLogs
from .call_events import BackwardListener
from .call_hooks import CallHooks
from .graph_watch import GraphOwners, GraphWatch

#: Closes the segments of a log above one that were left without their hooks.
CloseDownTo = Callable[[ThreadLog, Segment | None], None]


class BackwardWatcher:
    """Wraps the entry of the autograd engine for one tracker, and knows which backwards are running."""

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
        self._running: list[Backward] = []
        self._unseen: tuple[int, GraphOwners] | None = None  # of a graph task that no `Backward` describes
        self.listeners: list[BackwardListener] = []

    def start(self) -> None:
        """Wraps torch's `_engine_run_backward`, through which every backward from Python goes."""
        keep_out_of_dynamo(CallHooks.plan, CallHooks._move_on, CallHooks._mark, CallHooks._finish)
        keep_out_of_dynamo(GraphWatch.__call__)
        keep_out_of_dynamo(BackwardWatcher._make, BackwardWatcher._begin, BackwardWatcher._end)
        keep_out_of_dynamo(BackwardWatcher._wrap, BackwardWatcher._run, with_callees=False)
        self._entry.wrap(self._wrap)

    def stop(self) -> None:
        """Restores `_engine_run_backward`."""
        self._forget_unseen()
        self._entry.restore()

    def _wrap(self, original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def _engine_run_backward(t_outputs: Any, *args: Any, **kwargs: Any) -> Any:
            if is_dynamo_compiling() or not self._subscribers.users or is_tracing():
                return original(t_outputs, *args, **kwargs)
            return self._run(original, t_outputs, args, kwargs)

        return _engine_run_backward

    def _run(self, original: Callable[..., Any], outputs: Any, args: Any, kwargs: Any) -> Any:
        backward, hooks = self._make(args, kwargs)
        raised = True
        try:
            self._begin(backward, hooks, outputs)
            result = original(outputs, *args, **kwargs)
            raised = False
            return result
        finally:
            self._end(backward, hooks, raised)

    def _make(self, args: Any, kwargs: Any) -> tuple[Backward, CallHooks]:
        log, task = self._logs.current, graph_task_id()
        outer = log.backward or (self.running(log, task) if task >= 0 else None)
        backward = Backward(log, outer, args, kwargs)
        return backward, CallHooks(backward, self._subscribers, self._logs, self._device_times)

    def _begin(self, backward: Backward, hooks: CallHooks, outputs: Any) -> None:
        log = backward.log
        log.backward = backward
        backward.outputs = outputs
        log.context = self._logs.outside  # modules that run now do not run inside the open call
        self._running.append(backward)
        self._forget_unseen()
        with self._subscribers.guard(None):
            if backward.create_graph and log.segment is None:
                backward.span = BackwardSpan(sequence_nr(), None)
                log.spans.append(backward.span)
            tell_all(self._subscribers.backward_began, backward)
            users = list(self._subscribers.users)
            times = any(user.wants_backward_events for user in users)
            additions = any(user.wants_additions for user in users)
            listeners = tuple(self.listeners)
            if times or additions or listeners:
                if isinstance(outputs, torch.Tensor):
                    outputs = (outputs,)
                hooks.plan(outputs, self.owner, listeners, times=times, additions=additions)

    def _end(self, backward: Backward, hooks: CallHooks, raised: bool) -> None:
        log = backward.log
        log.backward = backward.outer_of_thread
        backward.outputs = backward.owners = None
        self._running = [each for each in self._running if each is not backward]
        hooks.remove()
        began = backward.calls.began
        is_timed = bool(began) and began[-1] is not None
        backward.end(raised, self._device_times.record(began[-1].clock.device) if is_timed else None)
        with self._subscribers.guard(None):
            self._close_down_to(log, backward.segment)
            if log.segment is backward.segment:
                log.context = backward.context
            if backward.span is not None:
                backward.span.last_seq = sequence_nr()
            backward.first_id = self._logs.take_ids(len(backward.calls))
            tell_all(self._subscribers.backward_ended, backward)

    def is_running(self) -> bool:
        """Returns whether a backward runs on any thread."""
        return bool(self._running)

    def running(self, log: ThreadLog, task: int) -> Backward | None:
        """Returns the backward of a graph task; None if it did not come through the wrapped entry."""
        for backward in reversed(self._running):
            if backward.task == task:
                return backward
        if log.backward is not None and log.backward.task < 0:
            log.backward.task = task
            return log.backward
        unknown = [backward for backward in self._running if backward.task < 0]
        if len(unknown) == 1:  # on a thread of the engine's own
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
        outer = None if backward is None else backward.outer
        if backward is None or outer is None or outer.log is not owner or backward.inside is None:
            return None
        if number < outer.first_seq:
            return None
        return owner.call_of(backward.inside._sequence_nr())

    def has_one_owner(self, log: ThreadLog) -> bool:
        """Returns whether this thread has built every graph that is known."""
        return not any(each.spans for each in self._logs.all if each is not log)

    def owner(self, log: ThreadLog, task: int, node: Any) -> ThreadLog | None:
        """Returns the log of the thread that built the running graph; None if that cannot be known.

        Sequence numbers count per thread. If several threads have graphs, only the graph itself can tell which thread
        gave the numbers.
        """
        if self.has_one_owner(log):
            return log
        number = node._sequence_nr()
        own, backward = log.span_of(number), self.running(log, task)
        outer = None if backward is None else backward.outer
        if isinstance(own, Segment) and outer is not None and own.task == outer.task:
            return log  # what this thread recomputed itself, in the backward around this one
        known = set(self._owners_of(task, backward).below(node))
        if backward is not None:
            known |= backward.reached_logs
        if len(known) > 1:
            known = {each for each in known if each.span_of(number) is not None}
        return known.pop() if len(known) == 1 else None

    def _owners_of(self, task: int, backward: Backward | None) -> GraphOwners:
        """Returns the owners of a graph that runs, which are forgotten when the backward ends."""
        if backward is not None:
            if backward.owners is None:
                backward.owners = GraphOwners()
            owners: GraphOwners = backward.owners
            return owners
        unseen = self._unseen
        if unseen is None or unseen[0] != task:  # a backward that C++ code started
            unseen = self._unseen = task, GraphOwners()
            queue_callback(
                self._forget_unseen
            )  # not called if the backward raises: then the next one forgets
        return unseen[1]

    def _forget_unseen(self) -> None:
        self._unseen = None
