"""Watches every backward at torch's one Python door; on request takes the begin and end of each call's backward."""

import functools
import time
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from .graph_watch import GraphWatch, watched_segments
from .segments import BackwardSpan, CallRef, Segment
from .torch_internals import (
    ACCUMULATE_SEQUENCE_NR,
    BackwardDoor,
    current_node,
    graph_task_id,
    is_dynamo_compiling,
    is_functorch_tensor,
    keep_out_of_dynamo,
    sequence_nr,
    will_engine_execute,
)

if TYPE_CHECKING:
    from .scopes import ScopeTracker, ThreadLog

#: A backward and its outputs: what `_engine_run_backward` takes after them, in order.
_CREATE_GRAPH, _INPUTS = 2, 3


class BackwardCall:
    """The backward of one call: from its first autograd node to the first node outside it."""

    __slots__ = ("above", "call", "call_id", "end_ns", "raised", "start_ns", "thread")

    def __init__(self, call: CallRef, above: "BackwardCall | None", start_ns: int, thread: int) -> None:
        self.call = call
        self.above = above
        self.start_ns = start_ns
        self.end_ns = -1
        self.raised = False
        self.thread = thread
        self.call_id = -1


class Backward:
    """One run of the autograd engine."""

    def __init__(self, log: "ThreadLog", args: Sequence[Any], kwargs: dict[str, Any]) -> None:
        self.log = log
        self.outer = log.backward
        self.task = -1  # learnt from the first of our hooks that runs in it
        self.accumulate = bool(kwargs.get("accumulate_grad", True))  # backward(), not autograd.grad()
        self.create_graph = bool(args[_CREATE_GRAPH]) if len(args) > _CREATE_GRAPH else False
        self.inputs = args[_INPUTS] if len(args) > _INPUTS else kwargs.get("inputs", ())
        self.reached: list[Segment] = []
        self.calls: list[BackwardCall] = []
        self.first_seq = sequence_nr()
        self.inside = current_node()  # the node that runs this backward in its own: a reentrant checkpoint
        self.start_ns = time.perf_counter_ns()
        self.end_ns = -1
        self.raised = False
        self.span: BackwardSpan | None = None
        self.segment = log.segment  # the module call it runs in, if it does: autograd.grad in a forward
        self.place = log.place
        self._open: list[BackwardCall] = []
        self._handles: list[Any] = []
        self._marks_additions = False
        self._adding_for = -1

    def is_adding(self, number: int) -> bool | None:
        """Whether the node's own work is done and the engine is adding up; None: not watched."""
        return self._adding_for == number if self._marks_additions else None

    def plan(self, outputs: Iterable[Any], owner_of: Callable[[Any], Any], marks_additions: bool) -> None:
        """Has the first node to run place hooks wherever the running call will change."""
        outputs = list(outputs)
        roots = _root_nodes(outputs)
        placed = False
        self._marks_additions = marks_additions

        def place(grad_outputs: Any) -> None:
            nonlocal placed
            if not placed and not is_dynamo_compiling():  # compiled autograd would trace the walk
                placed = True
                self.task = graph_task_id()
                self._place_hooks(roots, outputs, owner_of)

        self._handles = [node.register_prehook(place) for node in roots]

    def _place_hooks(self, roots: list[Any], outputs: list[Any], owner_of: Callable[[Any], Any]) -> None:
        """Walks the graph once. The engine runs nodes in descending sequence number, so the calls that the
        sorted nodes belong to are the calls in the order of their backward."""
        first = current_node()
        nodes, edges = _walk(roots)
        if self.inputs and will_engine_execute is not None:
            nodes = [node for node in nodes if node is first or will_engine_execute(node)]
        nodes.sort(key=_number, reverse=True)
        owner = owner_of(first)
        if owner is not None:
            self._place_moves(nodes, _calls_of(owner, [_number(node) for node in nodes]), first)
        if self._marks_additions:
            self._place_marks(nodes, edges, _fed_at_start(outputs, edges))

    def _place_moves(self, nodes: list[Any], calls: list[CallRef | None], first: Any) -> None:
        parents: dict[Segment, list[int]] = {}
        before: CallRef | None = None
        for node, call in zip(nodes, calls, strict=True):
            if call == before:
                continue
            before = call
            if call is not None and call.segment not in parents:
                parents[call.segment] = call.segment.structure().parent.tolist()
            move = functools.partial(self._move, call, parents)
            if node is first:
                move(None)  # its hooks are running: one placed now would not
            else:
                self._handles.append(node.register_prehook(move))

    def _place_marks(self, nodes: list[Any], edges: dict[Any, Any], fed: set[Any]) -> None:
        for node in nodes:
            targets = [edge for edge in edges[node] if edge[0] is not None]
            if len(set(targets)) < len(targets) or not fed.isdisjoint(targets):
                number = _number(node)
                self._handles.append(node.register_hook(functools.partial(self._mark, number)))
            fed.update(targets)

    def _mark(self, number: int, grad_inputs: Any, grad_outputs: Any) -> None:
        if not is_dynamo_compiling():
            self._adding_for = number

    def _move(self, call: CallRef | None, parents: dict[Segment, list[int]], grad_outputs: Any) -> None:
        """The engine goes on to nodes of `call`: calls that this leaves end, those it enters begin."""
        if is_dynamo_compiling():
            return
        now = time.perf_counter_ns()
        if self.span is not None:
            self.span.seqs.append(sequence_nr())
            self.span.targets.append(call)
        entered: list[CallRef] = []
        at = call
        while at is not None and not any(each.call == at for each in self._open):
            entered.append(at)
            above = parents[at.segment][at.index]
            at = None if above < 0 else CallRef(at.segment, above)
        while self._open and self._open[-1].call != at:
            self._open.pop().end_ns = now
        for each in reversed(entered):
            begun = BackwardCall(each, self._above(), now, self.log.number)
            self._open.append(begun)
            self.calls.append(begun)

    def _above(self) -> BackwardCall | None:
        if self._open:
            return self._open[-1]
        return self.outer._above() if self.outer is not None else None

    def end(self, raised: bool) -> None:
        """Ends what is open, and takes every hook out of the graph."""
        for handle in self._handles:
            handle.remove()
        self._handles = []
        self.inside = None
        self.end_ns = time.perf_counter_ns()
        self.raised = raised
        while self._open:
            call = self._open.pop()
            call.end_ns, call.raised = self.end_ns, raised


class BackwardWatcher:
    """Stands in torch's door for the tracker, and knows which backward is running."""

    def __init__(self, tracker: "ScopeTracker") -> None:
        self._tracker = tracker
        self._door = BackwardDoor()
        self._running: list[Backward] = []
        self.events_wanted = False
        self.additions_wanted = False

    def start(self) -> None:
        """Wraps the door."""
        keep_out_of_dynamo(Backward.plan, Backward._move, Backward._mark, GraphWatch.__call__)
        keep_out_of_dynamo(BackwardWatcher._begin, BackwardWatcher._end)
        keep_out_of_dynamo(BackwardWatcher._wrap, BackwardWatcher._run, with_callees=False)
        self._door.open(self._wrap)

    def stop(self) -> None:
        """Gives the door back."""
        self._door.close()

    def _wrap(self, original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def _engine_run_backward(t_outputs: Any, *args: Any, **kwargs: Any) -> Any:
            if is_dynamo_compiling() or not self._tracker.listeners:
                return original(t_outputs, *args, **kwargs)
            return self._run(original, t_outputs, args, kwargs)

        return _engine_run_backward

    def _run(self, original: Callable[..., Any], outputs: Any, args: Any, kwargs: Any) -> Any:
        backward = self._begin(outputs, args, kwargs)
        raised = True
        try:
            result = original(outputs, *args, **kwargs)
            raised = False
            return result
        finally:
            self._end(backward, raised)

    def _begin(self, outputs: Any, args: Any, kwargs: Any) -> Backward:
        log = self._tracker.log
        backward = log.backward = Backward(log, args, kwargs)
        log.place = self._tracker.outside  # modules that run now do not run inside the open call
        self._running.append(backward)
        with self._tracker.guard(None):
            if backward.create_graph and log.segment is None:
                backward.span = BackwardSpan(sequence_nr(), None)
                log.spans.append(backward.span)
            for listener in list(self._tracker.listeners):
                listener.backward_began(backward)
            if self.events_wanted or self.additions_wanted:
                if isinstance(outputs, torch.Tensor):
                    outputs = (outputs,)
                owner_of = functools.partial(self._owner_at_start, backward)
                backward.plan(outputs, owner_of, self.additions_wanted)
        return backward

    def _end(self, backward: Backward, raised: bool) -> None:
        log = backward.log
        log.backward = backward.outer
        self._running.remove(backward)
        backward.end(raised)
        with self._tracker.guard(None):
            self._tracker.close_down_to(log, backward.segment)
            if log.segment is backward.segment:
                log.place = backward.place
            if backward.span is not None:
                backward.span.last_seq = sequence_nr()
            first_id = self._tracker.take_ids(len(backward.calls))
            for offset, call in enumerate(backward.calls):
                call.call_id = first_id + offset
            for listener in list(self._tracker.listeners):
                listener.backward_ended(backward)

    def running(self, log: "ThreadLog", task: int) -> Backward | None:
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

    def reached(self, segment: Segment, log: "ThreadLog") -> None:
        """Backward has come to the outputs of a segment."""
        backward = self.running(log, graph_task_id())
        if backward is not None and segment not in backward.reached:
            backward.reached.append(segment)

    def recomputed_by(self, owner: "ThreadLog", backward: Backward | None, number: int) -> CallRef | None:
        """The call that owns a node made by a reentrant checkpoint's recompute outside of any module.

        Such nodes were made since the surrounding backward began; all others outside of spans are nobody's.
        """
        outer = None if backward is None else backward.outer
        if backward is None or outer is None or backward.inside is None or number < outer.first_seq:
            return None
        return owner.call_of(_number(backward.inside))

    def owner(self, log: "ThreadLog", task: int, node: Any) -> "ThreadLog | None":
        """The log of the thread that built the graph now running; None if that cannot be known.

        Sequence numbers count per thread: where several threads have graphs, only what the graph itself
        holds can tell whose the numbers are.
        """
        with_spans = [each for each in self._tracker.logs if each.spans]
        if len(with_spans) <= 1:
            return with_spans[0] if with_spans else log
        number = _number(node)
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


def _root_nodes(outputs: Iterable[Any]) -> list[Any]:
    nodes: dict[Any, None] = {}
    with torch._C.DisableTorchFunction():
        for output in outputs:
            if isinstance(output, torch.Tensor):
                node = None if is_functorch_tensor(output) else output.grad_fn
            else:
                node = getattr(output, "node", None)  # a GradientEdge
            if node is not None and _number(node) != ACCUMULATE_SEQUENCE_NR:
                nodes[node] = None
    return list(nodes)


def _walk(roots: list[Any]) -> tuple[list[Any], dict[Any, Any]]:
    """All nodes below the roots but AccumulateGrad, and for each its edges."""
    edges: dict[Any, Any] = {}
    seen = set(roots)
    pending = list(roots)
    while pending:
        node = pending.pop()
        below = node.next_functions
        edges[node] = below
        for each, _ in below:
            if each is not None and each not in seen:
                seen.add(each)
                if each._sequence_nr() != ACCUMULATE_SEQUENCE_NR:
                    pending.append(each)
    return list(edges), edges


def _fed_at_start(outputs: list[Any], edges: dict[Any, Any]) -> set[Any]:
    """The graph's inputs that get a gradient before any node has run: those of the outputs themselves."""
    fed: set[Any] = set()
    leaves = set()
    with torch._C.DisableTorchFunction():
        for output in outputs:
            if not isinstance(output, torch.Tensor):
                fed.add((getattr(output, "node", None), getattr(output, "output_nr", 0)))
            elif output.grad_fn is not None:
                fed.add((output.grad_fn, output.output_nr))
            else:
                leaves.add(id(output))
    if (
        leaves
    ):  # an output that is a leaf: what accumulates its gradient is in the graph if anything else feeds it
        for edge in (edge for below in edges.values() for edge in below if edge[0] is not None):
            if _number(edge[0]) == ACCUMULATE_SEQUENCE_NR and id(edge[0].variable) in leaves:
                fed.add(edge)
    return fed


def _calls_of(owner: "ThreadLog", numbers: list[int]) -> list[CallRef | None]:
    """For nodes in descending order of number: the call that each was made in."""
    spans = owner.spans
    starts = np.array([span.first_seq for span in spans], np.int64)
    sorted_numbers = np.array(numbers, np.int64)
    at_span = (np.searchsorted(starts, sorted_numbers, side="right") - 1).tolist()
    calls: list[CallRef | None] = []
    begin = 0
    while begin < len(numbers):
        end = begin
        while end < len(numbers) and at_span[end] == at_span[begin]:
            end += 1
        span = spans[at_span[begin]] if at_span[begin] >= 0 else None
        calls.extend(_calls_in(owner, span, sorted_numbers[begin:end]))
        begin = end
    return calls


def _calls_in(owner: "ThreadLog", span: Any, numbers: Any) -> Iterable[CallRef | None]:
    if not isinstance(span, Segment) or span.last_seq is None or numbers[0] >= span.last_seq:
        for number in numbers.tolist():
            found = owner.span_of(number)
            yield None if found is None else found.call_at(number)
        return
    events = np.searchsorted(span.seqs, numbers, side="right") - 1
    for index in span.structure().scope_after[events].tolist():
        yield None if index < 0 else CallRef(span, index)


def _number(node: Any) -> int:
    return node._sequence_nr()  # type: ignore[no-any-return]
