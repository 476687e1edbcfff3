"""Places hooks on the nodes where the running call changes, to record when each call's backward begins and ends."""

import time
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any

from ...recording.process import collector_paused
from ...torch_internals.autograd import current_node, graph_task_id, queue_callback, sequence_nr
from ...torch_internals.dynamo import is_dynamo_compiling
from ..log.device_times import DeviceTimes
from ..log.listeners import Subscribers
from ..log.segments import CallRef, Segment
from ..log.thread_log import Backward, ThreadLog, ThreadLogs
from .call_events import BackwardListener, CallEvents
from .graph_walk import begins_at_leaf, root_nodes
from .plan import NO_CHANGES, CallChanges, find_adding_nodes, find_calls, find_changes, read_graph

#: A function that returns the log of the thread that made each of some nodes; None where it is not known.
MakersOf = Callable[[Backward, Sequence[Any]], Sequence[ThreadLog | None]]


class CallHooks:
    """The hooks on the autograd nodes of one backward."""

    def __init__(
        self,
        backward: Backward,
        subscribers: Subscribers,
        logs: ThreadLogs,
        device_times: DeviceTimes,
        follow_on: Callable[[ThreadLog, Backward], None],
    ) -> None:
        self._backward = backward
        self._device_times = device_times
        self._subscribers = subscribers
        self._logs = logs
        self._follow_on = follow_on
        self._handles: list[Any] = []
        self._changes: CallChanges = NO_CHANGES
        self._next_change = 0
        #: By node, the innermost call that holds all sources of the gradients that meet behind it.
        self._met_in: dict[Any, CallRef | None] = {}
        self._events: CallEvents | None = None
        self._takes_times = True

    def plan(
        self,
        outputs: Iterable[Any],
        makers_of: MakersOf,
        listeners: Sequence[BackwardListener],
        *,
        times: bool,
        additions: bool,
    ) -> None:
        """Registers a hook on the first node, which places hooks on the nodes where the running call changes.

        Args:
            times: whether to record when the backward of each call begins and ends.
            additions: whether to distinguish the engine's sums of gradients from the work of nodes.
        """
        outputs = list(outputs)
        roots = root_nodes(outputs)
        placed = False
        self._backward.marks_additions = additions
        self._takes_times = times or bool(self._backward.spans)

        def place_hooks(grad_outputs: Any) -> None:
            nonlocal placed
            if not placed and not is_dynamo_compiling():  # compiled autograd would trace the walk
                placed = True
                begins_here = False
                self._learn_thread()
                with self._subscribers.guard(None), collector_paused():
                    begins_here = self._place_hooks(roots, outputs, makers_of, listeners)
                if begins_here:
                    self._move_on(grad_outputs)  # its hooks run already, so a new one would not

        self._handles = [node.register_prehook(place_hooks) for node in roots]
        self._backward.learns_task = not begins_at_leaf(outputs)

    def plan_learning(self, outputs: Any) -> None:
        """Registers a hook on the first nodes, by which the backward learns its graph task and its thread."""

        def learn(grad_outputs: Any) -> None:
            if not is_dynamo_compiling():
                self._learn_thread()

        self._handles = [node.register_prehook(learn) for node in root_nodes(outputs)]
        self._backward.learns_task = not begins_at_leaf(outputs)

    def _learn_thread(self) -> None:
        self._backward.task = graph_task_id()
        with self._subscribers.guard(None):
            self._follow_on(self._logs.current, self._backward)

    def _place_hooks(
        self,
        roots: list[Any],
        outputs: list[Any],
        makers_of: MakersOf,
        listeners: Sequence[BackwardListener],
    ) -> bool:
        """Places the hooks. Returns whether the node that is about to run is itself the first node of a call."""
        first = current_node()
        graph = read_graph(roots, first, self._backward.is_pruned)
        makers = makers_of(self._backward, graph.nodes)
        calls = find_calls(graph, makers)
        owner = next((maker for node, maker in zip(graph.nodes, makers, strict=True) if node is first), None)
        if owner is not None:
            extra: Collection[int] = ()
            if listeners:
                self._events = CallEvents(graph, owner.spans, listeners)
                extra = self._events.passthrough
                for node, collect in self._events.collectors():
                    self._handles.append(node.register_hook(collect))
                queue_callback(self._finish)
            self._changes = find_changes(graph, calls, extra)
            move_on = self._move_on  # one hook for all nodes, as they run in the order of the changes
            self._handles += [
                node.register_prehook(move_on) for node in self._changes.nodes if node is not first
            ]
        if self._backward.marks_additions:
            mark = self._mark  # one for all nodes: the garbage collector would visit one of each
            for node, call in find_adding_nodes(graph, outputs, calls):
                self._met_in[node] = call
                self._handles.append(node.register_hook(mark))
        return any(node is first for node in self._changes.nodes)  # most often it is the very first

    def _mark(self, grad_inputs: Any, grad_outputs: Any) -> None:
        if not is_dynamo_compiling():
            node = current_node()
            self._backward.adding_for, self._backward.adding_in = node._sequence_nr(), self._met_in.get(node)

    def _move_on(self, grad_outputs: Any) -> None:
        if is_dynamo_compiling():
            return
        now = time.perf_counter_ns()
        at = self._next_change
        number = current_node()._sequence_nr()
        numbers = self._changes.numbers
        if at >= len(numbers) or numbers[at] != number:  # two devices run two queues
            at = numbers.index(number)
        self._next_change = at + 1
        segment, index = self._changes.segments[at], self._changes.calls[at]
        if self._takes_times:
            self._backward.calls.move(segment, index, now, self._device_times.record_for(grad_outputs))
        if self._events is not None:
            is_own = self._changes.is_own[at]
            self._report_move(self._events, segment if is_own else None, index, number, grad_outputs)
        if self._backward.create_graph and self._backward.segment is None:
            log = self._logs.current
            self._follow_on(log, self._backward)
            span = self._backward.spans[log]
            span.seqs.append(sequence_nr())
            span.targets.append(None if segment is None else CallRef(segment, index))

    def _report_move(
        self, events: CallEvents, segment: Segment | None, index: int, number: int = -1, arriving: Any = ()
    ) -> None:
        """Reports to listeners that the engine goes on to another call."""
        log = self._logs.current
        log.hooked_task = self._backward.task
        try:
            events.move(log, segment, index, number, arriving)
        except Exception as error:
            if error is events.raised:  # a user's hook raised it
                raise
            self._subscribers.fail(error, None)
            if self._subscribers.strict:
                raise

    def _finish(self) -> None:
        """Reports that the engine has run every node."""
        if self._events is not None and not is_dynamo_compiling():
            self._report_move(self._events, None, -1)

    def remove(self) -> None:
        """Removes every hook from the graph."""
        for handle in self._handles:
            handle.remove()
        self._handles, self._changes, self._events, self._met_in = [], NO_CHANGES, None, {}
