"""The logs of threads, and the facts of the backwards that run on them."""

import threading
import time
import weakref
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from operator import attrgetter
from types import FrameType
from typing import Any

from ...torch_internals.autograd import current_node, graph_task_id, sequence_nr
from ...torch_internals.call_frames import call_kwargs
from .backward_calls import BackwardCalls
from .call_context import CallContext, ContextTree
from .segments import BackwardSpan, CallRef, Segment

#: Segments and spans that nothing holds are kept this long, for graphs that no output leads to (a stashed loss).
_UNWATCHED_KEPT = 16

#: A backward and its outputs: what `_engine_run_backward` takes after them, in order.
_CREATE_GRAPH, _INPUTS = 2, 3

#: The context of code whose modules are not followed; see `ThreadLog.aside`.
ASIDE = CallContext(None, None, -1)

_first_seq = attrgetter("first_seq")


@dataclass(eq=False, slots=True)
class ThreadLog:
    """The calls that run on one thread, and the segments whose graphs may still run backward."""

    all_contexts: list[CallContext]  # the tracker's, by number
    outside: CallContext
    context: CallContext
    number: int
    life: "weakref.ref[ThreadLife]"
    task: int = -1
    segment: Segment | None = None
    seqs: list[int] = field(default_factory=list)
    contexts: list[int] = field(default_factory=list)
    times: list[int] = field(default_factory=list)
    suspended: list[tuple[CallContext, int, Segment]] = field(default_factory=list)
    spans: list[Segment | BackwardSpan] = field(default_factory=list)  # by first_seq
    prune_at: int = 2 * _UNWATCHED_KEPT
    #: Nodes with smaller numbers may belong to calls that are not known any more.
    forgotten_seq: int = field(default_factory=sequence_nr)
    #: Of nodes that backwards make (`create_graph`), if this is a thread of the engine's own and has made some.
    mark: "NodeMark | None" = None
    unmarked_seq: int = 0  # such nodes that have no mark have smaller numbers than this one
    #: The last node that ran a backward in its own: its graph task, and its number ...
    nested_in: tuple[int, int] = (-1, -1)
    nested_from: int = 0  # ... from which number on it may have made what that backward runs ...
    nested_end: int = 0  # ... and the number that came next when the backward had ended
    backward: "Backward | None" = None
    hooked: CallRef | None = None  # for which call a user's backward hook runs ...
    hooked_task: int = -1  # ... and in which graph task
    given_kwargs: dict[str, Any] | None = None  # of a call that is being opened without a hook
    pinned: list[CallContext] = field(default_factory=list)  # of the calls that were opened without a hook
    #: Open scopes that no module is around, outermost first.
    scopes: list[CallContext] = field(default_factory=list)

    @contextmanager
    def aside(self) -> Iterator[None]:
        """Returns a context manager in which module calls on this thread are not logged.

        It is for calls that are not part of the run.
        """
        context, self.context = self.context, ASIDE
        try:
            yield
        finally:
            self.context = context

    @property
    def is_in_stretch(self) -> bool:
        """True if code that the user named runs, with no module around it or inside it."""
        return bool(self.scopes) and self.context is self.scopes[-1]

    @property
    def is_in_module(self) -> bool:
        """True if a call of a module runs on the thread."""
        return self.segment is not None and not self.segment.is_stretch

    def is_running(self, module_id: int) -> bool:
        """Returns whether an outermost call of this module runs on the thread."""
        segment = self.segment
        while segment is not None and segment.named.module_id != module_id:
            segment = segment.outer
        return segment is not None

    def kwargs_of(self, call_frame: FrameType) -> dict[str, Any]:
        """Returns the keyword arguments of the call that begins.

        Args:
            call_frame: the frame in which torch runs the hooks of the call.
        """
        return call_kwargs(call_frame) or {} if self.given_kwargs is None else self.given_kwargs

    def push(self, segment: Segment) -> None:
        """Makes the hooks append to a new segment."""
        if self.segment is not None:
            self.suspended.append((self.context, self.task, self.segment))
        self._use(segment, segment.context, segment.task)

    def pop(self) -> None:
        """Makes the hooks append to the segment that the last one interrupted, if there is one."""
        if self.suspended:
            context, task, segment = self.suspended.pop()
            self._use(segment, context, task)
        else:
            self.context, self.task, self.segment = self.outside, -1, None

    def _use(self, segment: Segment, context: CallContext, task: int) -> None:
        self.segment, self.context, self.task = segment, context, task
        self.seqs, self.contexts, self.times = segment.seqs, segment.contexts, segment.times

    def span_of(self, sequence: int) -> Segment | BackwardSpan | None:
        """Returns the innermost span in which this thread made the node with this number; None if there is none."""
        at = bisect_right(self.spans, sequence, key=_first_seq) - 1
        span: Any = self.spans[at] if at >= 0 else None
        while span is not None and span.last_seq is not None and sequence >= span.last_seq:
            span = span.outer
        return span  # type: ignore[no-any-return]

    def call_of(self, sequence: int) -> CallRef | None:
        """Returns the call in which this thread made the node with this number; None if there is none."""
        span = self.span_of(sequence)
        return None if span is None else span.call_at(sequence)

    def has_built_forward(self) -> bool:
        """Returns whether a graph that calls on this thread have built, outside of backwards, may run yet."""
        return any(isinstance(span, Segment) and span.task < 0 for span in self.spans)

    def has_built(self) -> bool:
        """Returns whether a graph that runs outside of this thread's own backwards may hold nodes of this thread."""
        return self.mark is not None or any(
            not isinstance(span, Segment) or span.task < 0 for span in self.spans
        )

    def has_made_for_forward(self, sequence: int) -> bool:
        """Returns whether a backward that a forward has begun made the node with this number on this thread."""
        span = self.span_of(sequence)
        return isinstance(span, BackwardSpan) and span.asked_by is not None

    def open_gradient_span(self, backward: "Backward", first_seq: int) -> BackwardSpan:
        """Returns a span for the nodes that a backward makes on this thread."""
        span = backward.spans[self] = BackwardSpan(first_seq, None)
        self.spans.append(span)
        return span

    def known_until(self) -> int:
        """Returns the number that came next at the last moment at which what the thread made was known."""
        last = self.spans[-1] if self.spans else None
        return max(self.nested_end, 0 if last is None else last.last_seq or last.first_seq)

    def begin_nested(self, node: tuple[int, int]) -> int:
        """Returns the number from which on a node that begins a backward may have made what that backward runs.

        Args:
            node: its graph task, and its number.
        """
        if self.nested_in != node:
            self.nested_in, self.nested_from = node, self.nested_end
        return self.nested_from

    def is_needed(self) -> bool:
        """Returns whether the thread lives, or a graph that it built may yet run backward."""
        return self.life() is not None or any(span.is_needed() for span in self.spans)

    def prune(self) -> None:
        """Drops the spans whose graphs are dead."""
        spans = self.spans
        if len(spans) > self.prune_at:
            kept_anyway = len(spans) - _UNWATCHED_KEPT
            kept: list[Segment | BackwardSpan] = []
            for at, span in enumerate(spans):
                if at >= kept_anyway or span.is_needed():
                    kept.append(span)
                else:
                    self.forgotten_seq = max(self.forgotten_seq, span.last_seq or 0)
            self.spans = kept
            self.prune_at = 2 * len(self.spans)  # so that each span pays little for the search


class NodeMark:
    """What the metadata of a node holds: the log of the thread that has made it; None if it is not known any more."""

    __slots__ = ("log",)

    def __init__(self, log: ThreadLog | None) -> None:
        self.log = log


class ThreadLife:
    """An object that only a thread holds, so that it dies with the thread."""

    __slots__ = ("__weakref__",)


class ThreadLogs:
    """The logs of all threads. A log is made when its thread first asks for it."""

    def __init__(self, tree: ContextTree) -> None:
        self._tree = tree
        self.outside = tree.outside
        self.all: list[ThreadLog] = []
        self.threads = threading.local()  # not a subclass, which takes twice as long to read from
        self._threads_seen = 0
        self._started_on = (-1, -1)  # thread, and the number that its next node has
        self._next_id = 0
        self._lock = threading.RLock()

    def start(self) -> None:
        """Records that every node which this thread makes from now on is known."""
        self._started_on = (threading.get_ident(), sequence_nr())

    @property
    def current(self) -> ThreadLog:
        """The log of the current thread."""
        try:
            log: ThreadLog = self.threads.log
        except AttributeError:
            with self._lock:
                self.threads.life = life = ThreadLife()
                log = self.threads.log = ThreadLog(
                    self._tree.contexts, self.outside, self.outside, self._threads_seen, weakref.ref(life)
                )
                thread, number = self._started_on
                if thread == threading.get_ident():
                    log.forgotten_seq = number  # what has been made since is known
                self._threads_seen += 1
                self.all = [other for other in self.all if other.is_needed()] + [log]
        return log

    def take_ids(self, number: int) -> int:
        """Reserves `number` call ids and returns the first of them."""
        with self._lock:
            first = self._next_id
            self._next_id += number
        return first


class Backward:
    """The facts of one run of the autograd engine."""

    def __init__(
        self, log: ThreadLog, outer: "Backward | None", args: Sequence[Any], kwargs: dict[str, Any]
    ) -> None:
        self.log = log
        self.calls: BackwardCalls = BackwardCalls()
        #: The one that runs this one in a node; the program may have begun it on another thread.
        self.outer = outer
        self.outer_of_thread = log.backward
        self.outer_call = -1 if self.outer is None else self.outer.calls.innermost
        #: The thread that waits for it, and for those around it: on a device their nodes run on another one.
        self.home: ThreadLog = log if self.outer is None else self.outer.home
        self.task = -1  # learnt from the first of our hooks that runs in it ...
        self.learns_task = False  # ... which is one that runs before the first of its nodes
        self.accumulate = bool(kwargs.get("accumulate_grad", True))  # backward(), not autograd.grad()
        self.create_graph = bool(args[_CREATE_GRAPH]) if len(args) > _CREATE_GRAPH else False
        self.is_pruned = bool(args[_INPUTS] if len(args) > _INPUTS else kwargs.get("inputs", ()))
        self.outputs: Any = None  # what it began with, while it runs
        self.reached: dict[Segment, None] = {}  # in order
        self.reached_logs: set[ThreadLog] = set()
        self.owners: Any = None  # of the nodes of its graph, while it runs and they are needed
        self.first_id = -1  # call_id of the first of its calls, given at the end
        self.first_seq = sequence_nr()
        #: What has been made before on the thread that waits has smaller numbers.
        self.home_seq: int = self.first_seq if self.outer is None else self.outer.home_seq
        self.inside = current_node()  # the node that runs this backward in its own: a reentrant checkpoint
        #: That node, or what ran in it, may have made nodes from this number on.
        self.remade_from = self._remade_from()
        self.start_ns = time.perf_counter_ns()
        self.end_ns = -1
        self.raised: frozenset[int] = frozenset()  # rows of `calls` that an exception ended
        self.spans: dict[ThreadLog, BackwardSpan] = {}  # of what it makes, by thread
        self.marks_made = False  # nodes that it makes on threads of the engine's own are marked with those
        self.segment = log.segment  # the module call it runs in, if it does: autograd.grad in a forward
        self.context = log.context
        #: Hooks distinguish the engine's sums of gradients from the work of nodes.
        self.marks_additions = False
        self.adding_for = -1  # the number of the node that has just done its own work ...
        #: ... and the innermost call that holds all calls whose gradients meet there.
        self.adding_in: CallRef | None = None

    def _remade_from(self) -> int:
        log, outer = self.log, self.outer
        if outer is None or self.inside is None:
            return self.first_seq
        began = log.begin_nested((graph_task_id(), self.inside._sequence_nr()))
        return max(began, outer.first_seq) if outer.log is log else began

    def may_have_remade(self, number: int) -> bool:
        """Returns whether the node with this number may have been made where the backward was begun, in a node."""
        return self.remade_from <= number < self.first_seq

    def is_adding(self, number: int) -> bool | None:
        """Returns whether the node's own work is done and the engine sums gradients; None if that is not watched."""
        return self.adding_for == number if self.marks_additions else None

    def end(self, raised: bool, on_device: Any = None) -> None:
        """Ends the backward, and the calls that are open in it; `on_device` is the event that a device reaches then."""
        self.inside = None
        self.end_ns = time.perf_counter_ns()
        self.raised = self.calls.open if raised else frozenset()
        self.calls.end(self.end_ns, on_device)
