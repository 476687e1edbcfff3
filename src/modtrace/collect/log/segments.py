"""Defines the log of what ran, one segment for each outermost module call: flat while it runs, structured when read."""

import weakref
from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from ...recording.phase import FORWARD
from ...torch_internals.call_frames import PipelineChunk
from ..names.module_names import NamedModule
from .call_context import CallContext
from .inside_calls import InsideCalls
from .nesting import OpenCalls, Structure, structure_of

# The codes of exit events, which stand in place of context numbers.
EXIT = -1
EXIT_RAISED = -2
EXIT_UNSEEN = -3


class CallRef(NamedTuple):
    """A call, identified by its segment and by its index in the order in which the segment's calls began."""

    segment: "Segment"
    index: int  # type: ignore[assignment]  # hides tuple.index

    @property
    def context(self) -> CallContext:
        """The calling context of the call."""
        return self.segment.context_of(self.index)

    @property
    def named(self) -> NamedModule:
        """The module, or the named scope, that was called."""
        assert self.context.named is not None
        return self.context.named

    @property
    def call_id(self) -> int | None:
        """The id of the call in the tables; None while its segment runs."""
        return None if self.segment.first_id is None else self.segment.first_id + self.index

    @property
    def parent(self) -> "CallRef | None":
        """The enclosing call in the same segment, or None."""
        above = self.segment.parent_of(self.index)
        return None if above < 0 else CallRef(self.segment, above)

    @property
    def first_seq(self) -> int:
        """The number of the first autograd node that could be made in the call."""
        return int(self.segment.seqs[self.segment.enter_event(self.index)])

    @property
    def counted_as(self) -> int:
        """A key that all calls of the same module share."""
        return self.named.module_id

    @property
    def rank(self) -> int:
        """The number of calls of the same module that began earlier in the segment."""
        return self.segment.rank_of(self.index)

    def in_place_of(self, repeated: "CallRef") -> "CallRef":
        """Returns the call that this one repeats, given the call that the surrounding call seen by hooks repeats."""
        return repeated


class InsideCall(NamedTuple):
    """A call inside of compiled code, where hooks see only the surrounding call of the compiled module."""

    seen: CallRef
    taps: int  # the number of the set of taps that saw it
    module_id: int
    nth: int  # its number among calls of its module that these taps saw inside of the seen call

    @property
    def segment(self) -> "Segment":
        """The segment of the seen call."""
        return self.seen.segment

    @property
    def index(self) -> int:  # type: ignore[override]  # hides tuple.index, as in `CallRef`
        """The index of the seen call."""
        return self.seen.index

    @property
    def context(self) -> CallContext:
        """The calling context of the seen call."""
        return self.seen.context

    @property
    def counted_as(self) -> int:
        """A key that all calls of the same module share."""
        return self.module_id

    @property
    def place(self) -> tuple[int, int] | None:
        """The call's number among its module's inside calls, and how many calls had begun; None if it was not seen."""
        return self.segment.inside.find(self.index, self.taps, self.module_id, self.nth)

    @property
    def rank(self) -> int:
        """The number of calls of the same module that began earlier in the segment, in compiled code or outside."""
        # A call that was not seen, as there were no taps yet, counts as beginning right after `index`.
        place, begun = self.place or (self.nth, self.index + 1)
        return place + bisect_left(self.segment.indices_of(self.module_id, begun), begun)

    def in_place_of(self, repeated: CallRef) -> "InsideCall":
        """Returns the call that this one repeats, given the call that the surrounding call seen by hooks repeats."""
        return self._replace(seen=repeated)


def call_at(segments: "Iterable[Segment]", now_ns: int) -> CallRef | None:
    """Returns the innermost call that ran at a time; None if calls ran in two segments, or no call."""
    found = [
        call
        for segment in segments
        if (call := segment.call_after(bisect_right(segment.times, now_ns) - 1, elsewhere=True)) is not None
    ]
    return found[0] if len(found) == 1 else None


class Segment:
    """An outermost module call, on one thread, with everything inside it.

    While it runs, its events are three plain lists that the hooks append to.
    """

    __slots__ = (
        "__weakref__", "_children", "_counts", "_events", "_open_calls", "_ranked", "_structure",
        "around", "call_tensors", "chunk", "context", "device_events", "first_id", "first_seq", "handover", "holders",
        "inside", "last_seq", "log", "outer", "owners", "phase", "region", "repeats", "task", "training",
        "trigger", "trigger_seq", "watches", "with_grad",
    )  # fmt: skip

    def __init__(self, log: "Any", context: CallContext, first_seq: int, task: int, with_grad: bool) -> None:
        self.log = log  # the log of the thread
        self.context = context
        self.first_seq = first_seq  # the sequence number of the first autograd node made inside ...
        self.last_seq: int | None = None  # ... and of the first one after it; None while the segment runs
        self.task = task  # the graph task in which it runs; -1 for none
        self.with_grad = with_grad
        self.phase = FORWARD
        self.trigger: CallRef | None = None  # in a recompute, the call whose backward requested it
        self.trigger_seq = -1  # the sequence number of the node that requested it
        self.region: Any = None  # the checkpointed region of that node
        self.around: CallRef | None = None  # the call around the repeated call
        self.repeats: CallRef | None = None  # the repeated call, if it was known at once
        #: Open scopes, and modules with a plain method running, around the segment; outermost first.
        self.owners: tuple[NamedModule, ...] = ()
        self.training: Any = None  # the flags `training` as it began, if they were read
        self.chunk: PipelineChunk | None = None  # what a stage of a pipeline runs in it
        self.outer: Any = None  # the span that the thread logged to before
        self._events: tuple[Any, Any, Any] = ([], [], [])  # sequence numbers, contexts, times
        self.first_id: int | None = None  # call_id of the first call, assigned when the segment closes
        self.holders = 0  # the number of recorders that have yet to write its rows
        self.handover: Any = None  # what it was given and returned, if nothing else ran when it began
        self.watches: list[weakref.ref[Any]] = []  # references that die with its graph
        self.call_tensors: Any = None  # inputs and outputs of its calls, if a listener needs them
        self.device_events: Any = None  # device events of its calls, if a user wants device times
        self.inside = InsideCalls()
        self._structure: Structure | None = None
        self._open_calls: OpenCalls | None = None
        self._children: list[list[int]] | None = None  # by call; None while the segment runs
        self._counts: Counter[Any] | None = None
        #: Ranks by call and calls by module_id, computed as far as they were needed.
        self._ranked: tuple[list[int], dict[int, list[int]]] | None = None

    @property
    def is_later_micro_batch(self) -> bool:
        """Whether a stage of a pipeline runs a micro-batch in it that others of the same batch came before."""
        return self.chunk is not None and bool(self.chunk.micro_batch)

    @property
    def named(self) -> NamedModule:
        """The module that was called."""
        assert self.context.named is not None
        return self.context.named

    @property
    def is_stretch(self) -> bool:
        """True if the segment is code that the user named, outside of any module."""
        return self.context.is_scope and self.named.parent is None

    @property
    def calls(self) -> int:
        """The number of calls in the segment, which must be closed."""
        return len(self._events[1]) // 2

    @property
    def is_closed(self) -> bool:
        """True if the segment has ended."""
        return self.last_seq is not None

    def close(self, last_seq: int, first_id: int) -> None:
        """Ends the segment; all its calls must have exit events."""
        self.last_seq = last_seq
        self.first_id = first_id
        self._structure = self._open_calls = None

    def pack(self) -> None:
        """Turns the events of a closed segment into arrays.

        This takes 30 us for 200 calls, so it is done on first reading.
        """
        if isinstance(self._events[0], list) and self.last_seq is not None:
            seqs, contexts, times = self._events
            self._events = (np.array(seqs, np.int64), np.array(contexts, np.int64), np.array(times, np.int64))

    @property
    def seqs(self) -> Any:
        """The sequence number at each event: a list while the segment runs, an array once it is closed."""
        self.pack()
        return self._events[0]

    @property
    def contexts(self) -> Any:
        """The number of the context entered at each event, or a code if the event is an exit."""
        self.pack()
        return self._events[1]

    @property
    def times(self) -> Any:
        """The time of each event, from `perf_counter_ns`."""
        self.pack()
        return self._events[2]

    @property
    def open_calls(self) -> OpenCalls:
        """The nesting of the calls of a running segment up to now."""
        if self._open_calls is None:
            self._open_calls = OpenCalls()
        self._open_calls.follow(self.contexts)
        return self._open_calls

    def has_made(self, sequence_nr: int) -> bool:
        """Returns whether the node with this number was made while the segment ran."""
        return self.first_seq <= sequence_nr and (self.last_seq is None or sequence_nr < self.last_seq)

    def is_needed(self) -> bool:
        """Returns whether rows of the segment are yet to be written, or its graph may yet run backward."""
        return self.holders > 0 or self.has_graph()

    def has_graph(self) -> bool:
        """Returns whether an output tensor of the segment is part of a living graph."""
        return any(watch() is not None for watch in self.watches)

    def structure(self, *, keep: bool = True) -> Structure:
        """Returns the nesting of the segment's calls. With `keep`, that of a closed segment is cached."""
        if self._structure is not None:
            return self._structure
        contexts = self.contexts
        if self.last_seq is None:
            entered = sum(1 if event >= 0 else -1 for event in contexts)
            contexts = np.array(contexts + [EXIT_UNSEEN] * entered, np.int64)
        structure = structure_of(contexts)
        if self.last_seq is not None and keep:
            self._structure = structure
        return structure

    def call_at(self, sequence_nr: int) -> CallRef | None:
        """Returns the call in which the autograd node with this number was made."""
        return self.call_after(bisect_right(self._events[0], sequence_nr) - 1)

    def call_after(self, event: int, *, elsewhere: bool = False) -> CallRef | None:
        """Returns the call that runs after an event of this segment; None outside of all calls.

        With `elsewhere` any thread may ask: what the segment's own thread reads, and drops at the end, is left alone.
        """
        if event < 0:
            return None
        if self.last_seq is not None:
            index = int(self.structure().scope_after[event])
        elif elsewhere:
            open_calls = OpenCalls()
            open_calls.follow([*self.contexts])
            index = open_calls.after[event]
        else:
            index = self.open_calls.after[event]
        return None if index < 0 else CallRef(self, index)

    def call_ids_at(self, times: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """Returns the ids of the innermost calls that ran at some times; -1 outside of all, or if the segment runs."""
        if self.first_id is None:
            return np.full(len(times), -1)
        events = np.searchsorted(self.times, times, side="right") - 1
        indices = np.where(events < 0, -1, self.structure().scope_after[np.maximum(events, 0)])
        return np.where(indices < 0, -1, self.first_id + indices)

    def enter_event(self, index: int) -> int:
        """Returns the event with which the call `index` began."""
        return (
            self.open_calls.entered[index]
            if self.last_seq is None
            else int(self.structure().enter_event[index])
        )

    def context_of(self, index: int) -> CallContext:
        """Returns the context of the call `index`."""
        context: CallContext = self.log.all_contexts[int(self.contexts[self.enter_event(index)])]
        return context

    def contexts_of_calls(self) -> list[int]:
        """Returns the numbers of the contexts of the segment's calls, in the order in which the calls began."""
        if self.last_seq is None:
            return self.open_calls.context
        contexts: list[int] = self.contexts[self.structure().enter_event].tolist()
        return contexts

    def call_inside(self, taps: int, module_id: int) -> InsideCall:
        """Adds a call of a module inside of compiled code in the running call, as seen by the given taps."""
        seen = CallRef(self, self.open_calls.innermost)
        nth = self.inside.add(seen.index, taps, module_id, len(self.open_calls.context))
        return InsideCall(seen, taps, module_id, nth)

    def forward_counts(self) -> Counter[Any]:
        """Returns the number of forward calls of each module in the segment, by `counted_as`."""
        if self.phase != FORWARD:
            return Counter()
        if self._counts is not None:
            return self._counts
        counts: Counter[Any] = Counter()
        for number, calls in Counter(self.contexts_of_calls()).items():
            counts[self.log.all_contexts[number].named.module_id] += calls
        counts.update(self.inside.counts())
        if self.last_seq is not None:
            self._counts = counts
        return counts

    def children_of(self, index: int) -> list[int]:
        """Returns the calls directly inside the call `index`."""
        if self.last_seq is None:
            return self.open_calls.children[index]
        if self._children is None:
            self._children = [[] for _ in range(self.calls)]
            for call, parent in enumerate(self.structure().parent.tolist()):
                if parent >= 0:
                    self._children[parent].append(call)
        return self._children[index]

    def rank_of(self, index: int) -> int:
        """Returns the number of calls of the same module that began in the segment before the call `index`."""
        rank = self._ranks(index)[0][index]
        if self.inside:
            rank += self.inside.count_before(CallRef(self, index).counted_as, index)
        return rank

    def indices_of(self, module_id: int, until: int) -> Sequence[int]:
        """Returns the ascending indices of a module's calls; those from `until` on may be missing."""
        return self._ranks(until - 1)[1].get(module_id, ())

    def _ranks(self, last: int) -> tuple[list[int], dict[int, list[int]]]:
        """Returns `_ranked`, completed at least up to the call `last`."""
        if self._ranked is None:
            self._ranked = [], {}
        ranks, known = self._ranked
        if len(ranks) <= last:
            contexts = self.log.all_contexts
            for number in self.contexts_of_calls()[len(ranks) :]:
                calls = known.setdefault(contexts[number].named.module_id, [])
                calls.append(len(ranks))
                ranks.append(len(calls) - 1)
        return self._ranked

    def parent_of(self, index: int) -> int:
        """Returns the parent of the call `index`; -1 for an outermost call."""
        return int(self.parents[index])

    @property
    def parents(self) -> Any:
        """The parents of all calls that have begun: a list while the segment runs, an array once it is closed."""
        return self.open_calls.parent if self.last_seq is None else self.structure().parent
