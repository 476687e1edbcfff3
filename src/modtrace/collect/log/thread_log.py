"""Defines the logs of threads, and the facts about the backwards that run on them."""

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
from .backward_span import BackwardSpan
from .call_context import CallContext, ContextTree
from .segments import CallRef, Segment

#: The number of spans kept although nothing refers to them, for graphs that no output leads to (a stored loss).
_UNWATCHED_KEPT = 16

#: The positions of two arguments of `_engine_run_backward`, counted without the outputs, which come first.
_CREATE_GRAPH, _INPUTS = 2, 3

#: The context of code in which module calls are not logged; see `ThreadLog.aside`.
ASIDE = CallContext(None, None, -1)

_first_seq = attrgetter("first_seq")


@dataclass(eq=False, slots=True)
class ThreadLog:
    """The calls that run on one thread, and its segments whose graphs may still run backward."""

    all_contexts: list[CallContext]  # the tracker's contexts by number
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
    spans: list[Segment | BackwardSpan] = field(default_factory=list)  # sorted by first_seq
    prune_at: int = 2 * _UNWATCHED_KEPT
    #: Nodes with smaller numbers may belong to calls that were forgotten.
    forgotten_seq: int = field(default_factory=sequence_nr)
    #: The mark of nodes that backwards made here for `create_graph`, if this is one of the engine's own threads.
    mark: "NodeMark | None" = None
    unmarked_seq: int = 0  # on such a thread, unmarked nodes have numbers below this
    #: The last node whose backward ran another backward: its graph task, and its number.
    nested_in: tuple[int, int] = (-1, -1)
    nested_from: int = 0  # the number of the first node that it may have made for that backward
    nested_end: int = 0  # the next number when that backward had ended
    backward: "Backward | None" = None
    hooked: CallRef | None = None  # the call for which a user's backward hook runs
    hooked_task: int = -1  # the graph task in which that hook runs
    given_kwargs: dict[str, Any] | None = None  # keyword arguments of a call that is opened without a hook
    pinned: list[CallContext] = field(default_factory=list)  # calls that were opened without a hook
    #: Open scopes outside of any module, outermost first.
    scopes: list[CallContext] = field(default_factory=list)

    @contextmanager
    def aside(self) -> Iterator[None]:
        """Returns a context manager inside which module calls on this thread are not logged.

        It is for our own calls, which are not part of the run.
        """
        context, self.context = self.context, ASIDE
        try:
            yield
        finally:
            self.context = context

    @property
    def is_in_stretch(self) -> bool:
        """True if code that the user named runs outside of any module, and no module runs in it."""
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
        """Makes the hooks append to the interrupted segment again, if there is one."""
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
        """Returns whether a graph that this thread's calls built outside of backwards may still run."""
        return any(isinstance(span, Segment) and span.task < 0 for span in self.spans)

    def has_built(self) -> bool:
        """Returns whether a graph that runs outside of this thread's backwards may have nodes of this thread."""
        return self.mark is not None or any(
            not isinstance(span, Segment) or span.task < 0 for span in self.spans
        )

    def has_made_for_forward(self, sequence: int) -> bool:
        """Returns whether a backward that was begun in a forward made the node on this thread."""
        span = self.span_of(sequence)
        return isinstance(span, BackwardSpan) and span.asked_by is not None

    def open_gradient_span(self, backward: "Backward", first_seq: int) -> BackwardSpan:
        """Returns a span for the nodes that a backward makes on this thread."""
        span = backward.spans[self] = BackwardSpan(first_seq, None)
        self.spans.append(span)
        return span

    def known_until(self) -> int:
        """Returns the node number that came next when it was last known what this thread made."""
        last = self.spans[-1] if self.spans else None
        return max(self.nested_end, 0 if last is None else last.last_seq or last.first_seq)

    def begin_nested(self, node: tuple[int, int]) -> int:
        """Returns the first number of the nodes that a node may have made for the backward that it begins.

        Args:
            node: the node's graph task and number.
        """
        if self.nested_in != node:
            self.nested_in, self.nested_from = node, self.nested_end
        return self.nested_from

    def is_needed(self) -> bool:
        """Returns whether the thread lives, or a graph that it built may still run backward."""
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
            self.prune_at = 2 * len(self.spans)  # so the search costs little for each span


class NodeMark:
    """The mark in a node's metadata: the log of the thread that made the node; None once it is forgotten."""

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
        self.threads = threading.local()  # a subclass would take twice as long to read from
        self._threads_seen = 0
        self._started_on = (-1, -1)  # a thread, and the number of the next node on it
        self._next_id = 0
        self._lock = threading.RLock()

    def start(self) -> None:
        """Records that all nodes that this thread makes from now on are known."""
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
                    log.forgotten_seq = number  # nodes that were made since are known
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
        #: The backward that runs this one in a node, maybe begun on another thread.
        self.outer = outer
        self.outer_of_thread = log.backward
        self.outer_call = -1 if self.outer is None else self.outer.calls.innermost
        #: The thread that waits for this and all surrounding backwards; a device runs their nodes on another one.
        self.home: ThreadLog = log if self.outer is None else self.outer.home
        self.task = -1  # -1 until the first of our hooks runs in it ...
        self.learns_task = False  # ... and whether that hook runs before the first node
        self.accumulate = bool(kwargs.get("accumulate_grad", True))  # False for autograd.grad()
        self.create_graph = bool(args[_CREATE_GRAPH]) if len(args) > _CREATE_GRAPH else False
        self.is_pruned = bool(args[_INPUTS] if len(args) > _INPUTS else kwargs.get("inputs", ()))
        self.outputs: Any = None  # the tensors that it begins with, while it runs
        self.reached: dict[Segment, None] = {}  # the segments that it has reached, in order
        self.reached_logs: set[ThreadLog] = set()
        self.owners: Any = None  # the owners of its graph's nodes, if needed while it runs
        self.first_id = -1  # call_id of its first call, assigned at its end
        self.first_seq = sequence_nr()
        #: The thread that called the outermost backward has made the nodes with smaller numbers before it.
        self.home_seq: int = self.first_seq if self.outer is None else self.outer.home_seq
        self.inside = current_node()  # the node that runs this backward: a reentrant checkpoint
        #: The first number of the nodes that were made while the node `inside` ran, as in the forward it repeats.
        self.remade_from = self._remade_from()
        self.start_ns = time.perf_counter_ns()
        self.end_ns = -1
        self.raised: frozenset[int] = frozenset()  # rows of `calls` that ended with an exception
        self.spans: dict[ThreadLog, BackwardSpan] = {}  # by thread, the nodes that it makes
        self.marks_made = False  # whether nodes made on the engine's own threads are marked
        self.segment = log.segment  # the module call that began it, as by autograd.grad
        self.context = log.context
        #: Whether hooks distinguish the engine's sums of gradients from the work of nodes.
        self.marks_additions = False
        self.adding_for = -1  # the number of the node that has just finished its own work
        #: The innermost call that contains all calls whose gradients are added after the node `adding_for`.
        self.adding_in: CallRef | None = None

    def _remade_from(self) -> int:
        log, outer = self.log, self.outer
        if outer is None or self.inside is None:
            return self.first_seq
        began = log.begin_nested((graph_task_id(), self.inside._sequence_nr()))
        return max(began, outer.first_seq) if outer.log is log else began

    def may_have_remade(self, number: int) -> bool:
        """Returns whether the node may have been made in the surrounding node that began this backward."""
        return self.remade_from <= number < self.first_seq

    def is_adding(self, number: int) -> bool | None:
        """Returns whether a node's work is done and the engine adds gradients; None if this is not watched."""
        return self.adding_for == number if self.marks_additions else None

    def end(self, raised: bool, on_device: Any = None) -> None:
        """Ends the backward and its open calls; `on_device` is the device event that was recorded for this moment."""
        self.inside = None
        self.end_ns = time.perf_counter_ns()
        self.raised = self.calls.open if raised else frozenset()
        self.calls.end(self.end_ns, on_device)
