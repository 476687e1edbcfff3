"""Watches every backward at torch's one Python door; on request takes the begin and end of each call's backward."""

import functools
import time
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from ...torch_internals import (
    BackwardDoor,
    current_node,
    graph_task_id,
    is_dynamo_compiling,
    is_tracing,
    keep_out_of_dynamo,
    queue_callback,
    sequence_nr,
)
from ..log.backward_calls import BackwardCalls
from ..log.segments import BackwardSpan, CallRef, Segment
from ..log.thread_log import ThreadLog
from .call_events import BackwardHearer, Hearing
from .graph_watch import GraphWatch, watched_segments
from .plan import NO_MOVES, Moves, find_adding_nodes, find_moves, read_graph, root_nodes

if TYPE_CHECKING:
    from ..scopes.tracker import ScopeTracker

#: A backward and its outputs: what `_engine_run_backward` takes after them, in order.
_CREATE_GRAPH, _INPUTS = 2, 3


class Wanted(NamedTuple):
    """What is to be known of a backward beyond that it runs."""

    times: bool
    additions: bool  # which work is the engine's own adding up of gradients
    hearers: tuple[BackwardHearer, ...]


class Backward:
    """One run of the autograd engine."""

    def __init__(
        self, tracker: "ScopeTracker", log: ThreadLog, args: Sequence[Any], kwargs: dict[str, Any]
    ) -> None:
        self._tracker = tracker
        self.log = log
        self.calls: BackwardCalls = BackwardCalls()
        self.outer: Backward | None = log.backward
        self.outer_call = -1 if self.outer is None else self.outer.calls.innermost
        self.task = -1  # learnt from the first of our hooks that runs in it
        self.accumulate = bool(kwargs.get("accumulate_grad", True))  # backward(), not autograd.grad()
        self.create_graph = bool(args[_CREATE_GRAPH]) if len(args) > _CREATE_GRAPH else False
        self.is_pruned = bool(args[_INPUTS] if len(args) > _INPUTS else kwargs.get("inputs", ()))
        self.outputs: Any = None  # what it began with, while it runs
        self.reached: list[Segment] = []
        self.first_id = -1  # call_id of the first of them, given at the end
        self.first_seq = sequence_nr()
        self.inside = current_node()  # the node that runs this backward in its own: a reentrant checkpoint
        self.start_ns = time.perf_counter_ns()
        self.end_ns = -1
        self.raised: frozenset[int] = frozenset()  # rows of `calls` that an exception ended
        self.span: BackwardSpan | None = None
        self.segment = log.segment  # the module call it runs in, if it does: autograd.grad in a forward
        self.place = log.place
        self._handles: list[Any] = []
        self._moves: Moves = NO_MOVES
        self._next_move = 0
        self._marks_additions = False
        self._adding_for = -1
        self._adding_in: CallRef | None = None
        self._hearing: Hearing | None = None
        self._takes_times = True

    def is_adding(self, number: int) -> bool | None:
        """Whether the node's own work is done and the engine is adding up; None: not watched."""
        return self._adding_for == number if self._marks_additions else None

    def adding_in(self) -> CallRef | None:
        """The innermost call that holds all whose gradients are being added."""
        return self._adding_in

    def plan(
        self,
        outputs: Iterable[Any],
        owner_of: Callable[[Any], Any],
        wanted: "Wanted",
    ) -> None:
        """Has the first node to run place hooks wherever the running call will change."""
        outputs = list(outputs)
        roots = root_nodes(outputs)
        placed = False
        self._marks_additions = wanted.additions
        self._takes_times = wanted.times or self.span is not None

        def place(grad_outputs: Any) -> None:
            nonlocal placed
            if not placed and not is_dynamo_compiling():  # compiled autograd would trace the walk
                placed = True
                self.task = graph_task_id()
                begins_here = False
                with self._tracker.guard(None):
                    begins_here = self._place_hooks(roots, outputs, owner_of, wanted.hearers)
                if begins_here:
                    self._move_on(grad_outputs)  # the node's hooks are running: one placed now would not

        self._handles = [node.register_prehook(place) for node in roots]

    def _place_hooks(
        self,
        roots: list[Any],
        outputs: list[Any],
        owner_of: Callable[[Any], Any],
        hearers: Sequence[BackwardHearer],
    ) -> bool:
        """Whether the node that is about to run is itself the first of a call."""
        first = current_node()
        graph = read_graph(roots, first, self.is_pruned)
        owner = owner_of(first)
        if owner is not None:
            extra: Collection[int] = ()
            if hearers:
                self._hearing = Hearing(graph, owner.spans, hearers)
                extra = self._hearing.passing
                for node, collect in self._hearing.collectors():
                    self._handles.append(node.register_hook(collect))
                queue_callback(self._finish)
            self._moves = find_moves(graph, owner, extra)
            move_on = self._move_on  # one for all nodes: they run in the order of the moves
            self._handles += [
                node.register_prehook(move_on) for node in self._moves.nodes if node is not first
            ]
        if self._marks_additions:
            for node, call in find_adding_nodes(graph, outputs, owner):
                mark = functools.partial(self._mark, node._sequence_nr(), call)
                self._handles.append(node.register_hook(mark))
        return any(node is first for node in self._moves.nodes)  # most often the very first

    def _mark(self, number: int, call: CallRef | None, grad_inputs: Any, grad_outputs: Any) -> None:
        if not is_dynamo_compiling():
            self._adding_for, self._adding_in = number, call

    def _move_on(self, grad_outputs: Any) -> None:
        if is_dynamo_compiling():
            return
        now = time.perf_counter_ns()
        at = self._next_move
        number = current_node()._sequence_nr()
        numbers = self._moves.numbers
        if at >= len(numbers) or numbers[at] != number:  # two devices, two queues
            at = numbers.index(number)
        self._next_move = at + 1
        segment, index = self._moves.segments[at], self._moves.calls[at]
        if self._takes_times:
            self.calls.move(segment, index, now)
        if self._hearing is not None:
            self._hear(self._hearing, segment, index, number, grad_outputs)
        if self.span is not None:
            self.span.seqs.append(sequence_nr())
            self.span.targets.append(None if segment is None else CallRef(segment, index))

    def _hear(
        self, hearing: Hearing, segment: Segment | None, index: int, number: int = -1, arriving: Any = ()
    ) -> None:
        """Goes on to another call, and tells of it."""
        tracker = self._tracker
        log = tracker.log
        log.hooked_task = self.task
        try:
            hearing.move(log, segment, index, number, arriving)
        except Exception as error:
            if error is hearing.raised:  # a hook of the user's
                raise
            tracker.fail(error, None)
            if tracker.strict:
                raise

    def _finish(self) -> None:
        """The engine has run every node."""
        if self._hearing is not None and not is_dynamo_compiling():
            self._hear(self._hearing, None, -1)

    def end(self, raised: bool) -> None:
        """Ends what is open, and takes every hook out of the graph."""
        for handle in self._handles:
            handle.remove()
        self._handles, self._moves, self.inside, self._hearing = [], NO_MOVES, None, None
        self.end_ns = time.perf_counter_ns()
        self.raised = self.calls.open if raised else frozenset()
        self.calls.end(self.end_ns)


class BackwardWatcher:
    """Stands in torch's door for the tracker, and knows which backward is running."""

    def __init__(self, tracker: "ScopeTracker") -> None:
        self._tracker = tracker
        self._door = BackwardDoor()
        self._running: list[Backward] = []
        self.events_wanted = False
        self.additions_wanted = False
        self.hearers: list[BackwardHearer] = []

    def start(self) -> None:
        """Wraps the door."""
        keep_out_of_dynamo(Backward.plan, Backward._move_on, Backward._mark, GraphWatch.__call__)
        keep_out_of_dynamo(BackwardWatcher._make, BackwardWatcher._begin, BackwardWatcher._end)
        keep_out_of_dynamo(BackwardWatcher._wrap, BackwardWatcher._run, with_callees=False)
        self._door.open(self._wrap)

    def stop(self) -> None:
        """Gives the door back."""
        self._door.close()

    def _wrap(self, original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def _engine_run_backward(t_outputs: Any, *args: Any, **kwargs: Any) -> Any:
            if is_dynamo_compiling() or not self._tracker.listeners or is_tracing():
                return original(t_outputs, *args, **kwargs)
            return self._run(original, t_outputs, args, kwargs)

        return _engine_run_backward

    def _run(self, original: Callable[..., Any], outputs: Any, args: Any, kwargs: Any) -> Any:
        backward = self._make(args, kwargs)
        raised = True
        try:
            self._begin(backward, outputs)
            result = original(outputs, *args, **kwargs)
            raised = False
            return result
        finally:
            self._end(backward, raised)

    def _make(self, args: Any, kwargs: Any) -> Backward:
        return Backward(self._tracker, self._tracker.log, args, kwargs)

    def _begin(self, backward: Backward, outputs: Any) -> None:
        log = backward.log
        log.backward = backward
        backward.outputs = outputs
        log.place = self._tracker.tree.outside  # modules that run now do not run inside the open call
        self._running.append(backward)
        with self._tracker.guard(None):
            if backward.create_graph and log.segment is None:
                backward.span = BackwardSpan(sequence_nr(), None)
                log.spans.append(backward.span)
            for listener in list(self._tracker.listeners):
                listener.backward_began(backward)
            for tap in list(self._tracker.taps):
                tap.backward_begins(backward, outputs)
            wanted = Wanted(self.events_wanted, self.additions_wanted, tuple(self.hearers))
            if any(wanted):
                if isinstance(outputs, torch.Tensor):
                    outputs = (outputs,)
                backward.plan(outputs, functools.partial(self._owner_at_start, backward), wanted)

    def _end(self, backward: Backward, raised: bool) -> None:
        log = backward.log
        log.backward = backward.outer
        backward.outputs = None
        self._running = [each for each in self._running if each is not backward]
        backward.end(raised)
        with self._tracker.guard(None):
            self._tracker.close_down_to(log, backward.segment)
            if log.segment is backward.segment:
                log.place = backward.place
            if backward.span is not None:
                backward.span.last_seq = sequence_nr()
            backward.first_id = self._tracker.take_ids(len(backward.calls))
            for listener in list(self._tracker.listeners):
                listener.backward_ended(backward)

    def is_running(self) -> bool:
        """Whether there is a backward, on whatever thread."""
        return bool(self._running)

    def running(self, log: ThreadLog, task: int) -> Backward | None:
        """The backward that a graph task belongs to; None if it did not come through the door."""
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
        """Backward has come to the outputs of a segment."""
        backward = self.running(log, graph_task_id())
        if backward is not None and segment not in backward.reached:
            backward.reached.append(segment)

    def recomputed_by(self, owner: ThreadLog, backward: Backward | None, number: int) -> CallRef | None:
        """The call that owns a node made by a reentrant checkpoint's recompute outside of any module.

        Such nodes were made since the surrounding backward began; all others outside of spans are nobody's.
        """
        outer = None if backward is None else backward.outer
        if backward is None or outer is None or backward.inside is None or number < outer.first_seq:
            return None
        return owner.call_of(backward.inside._sequence_nr())

    def has_one_owner(self, log: ThreadLog) -> bool:
        """Whether every graph that is known was built by this thread."""
        return not any(each.spans for each in self._tracker.logs if each is not log)

    def owner(self, log: ThreadLog, task: int, node: Any) -> ThreadLog | None:
        """The log of the thread that built the graph now running; None if that cannot be known.

        Sequence numbers count per thread: where several threads have graphs, only what the graph itself
        holds can tell whose the numbers are.
        """
        if self.has_one_owner(log):
            return log
        number = node._sequence_nr()
        own = log.span_of(number)
        if isinstance(own, Segment) and own.task >= 0:
            return log  # what this thread recomputed itself
        backward = self.running(log, task)
        known = {segment.log for segment in backward.reached} if backward is not None else set()
        known.update(segment.log for segment in watched_segments(node))
        if len(known) > 1:
            known = {each for each in known if each.span_of(number) is not None}
        return known.pop() if len(known) == 1 else None

    def _owner_at_start(self, backward: Backward, node: Any) -> Any:
        return self.owner(backward.log, backward.task, node)
