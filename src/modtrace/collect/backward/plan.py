"""Reads an autograd graph before it runs: which nodes will run, in which order, and in which call each was made."""

from collections.abc import Collection, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from ...torch_internals.autograd import ACCUMULATE_SEQUENCE_NR, will_engine_execute
from ...torch_internals.modes import DisableTorchFunction
from ...torch_internals.tensors import grad_fn_of, output_nr_of
from ..log.nesting import Ints
from ..log.segments import CallRef, Segment
from ..log.thread_log import ThreadLog
from .graph_walk import Edges, walk_graph

EdgesOfNodes = dict[Any, Edges]


class EngineGraph(NamedTuple):
    """The nodes below some roots, except those that only accumulate the gradient of a leaf."""

    nodes: list[Any]  # in the order in which the engine runs them: descending sequence number
    numbers: Ints  # the sequence numbers of the nodes
    edges: EdgesOfNodes
    pruned: bool  # whether the engine runs only nodes that certain inputs need
    roots: frozenset[int]  # the sequence numbers of the nodes at which the engine begins

    def has_any(self, first: int, end: int | None) -> bool:
        """Returns whether any node's number lies in a range; `end` is None if the range has no end yet."""
        if end is None:
            return len(self.numbers) > 0 and int(self.numbers[0]) >= first
        return self.next_before(end) >= first

    def next_before(self, number: int) -> int:
        """Returns the largest node number below `number`, that of the node that runs next; -1 if there is none."""
        at = int(np.searchsorted(-self.numbers, -number, side="right"))
        return int(self.numbers[at]) if at < len(self.numbers) else -1


class CallChanges(NamedTuple):
    """The autograd nodes at which backward passes from one module call to another, as parallel lists."""

    nodes: list[Any]
    numbers: list[int]
    segments: list[Segment | None]
    calls: list[int]  # indices of the calls in their segments; -1 outside of calls
    is_own: list[bool]  # see `NodeCalls`


NO_CHANGES = CallChanges([], [], [], [], [])


def read_graph(roots: list[Any], first: Any, pruned: bool) -> EngineGraph:
    """Walks the graph once, and returns its nodes in the order in which they will run.

    Args:
        first: the node that is about to run.
        pruned: the engine will run only a part of the graph, as in `backward(inputs=...)`.
    """
    nodes, numbers, edges = _walk(roots)
    order = np.argsort(np.array(numbers, np.int64), kind="stable")[::-1].tolist()
    if pruned and will_engine_execute is not None:
        order = [at for at in order if nodes[at] is first or will_engine_execute(nodes[at])]
    roots_numbers = frozenset(root._sequence_nr() for root in roots)
    return EngineGraph(
        [nodes[at] for at in order], np.array(numbers, np.int64)[order], edges, pruned, roots_numbers
    )


class NodeCalls(NamedTuple):
    """The calls that the nodes of a graph belong to, in the order of the nodes."""

    segments: list[Segment | None]
    of_segment: Ints  # the index of each node's segment
    call: Ints  # the index of each node's call in its segment; -1 for none
    is_own: npt.NDArray[np.bool_]  # made in the call's forward, not by a later backward


def find_calls(graph: EngineGraph, makers: Sequence[ThreadLog | None]) -> NodeCalls:
    """Returns the calls of the nodes. `makers` are the logs of the threads that have made them, None where unknown."""
    size = len(graph.numbers)
    segments: list[Segment | None] = [None]
    found = NodeCalls(segments, np.zeros(size, np.int64), np.full(size, -1, np.int64), np.zeros(size, bool))
    for maker in dict.fromkeys(makers):
        if maker is None:
            continue
        at = np.array([other is maker for other in makers])
        numbers = graph.numbers[at]
        theirs, of_segment, found.call[at] = calls_of_nodes(maker, numbers)
        found.of_segment[at] = np.where(of_segment > 0, of_segment + len(segments) - 1, 0)
        found.is_own[at] = _made_in_segment(numbers, maker, theirs, of_segment)
        segments += theirs[1:]
    return found


def find_changes(graph: EngineGraph, calls: NodeCalls, extra: Collection[int] = ()) -> CallChanges:
    """Returns the nodes at which the running call changes, the first node, and the nodes whose numbers are in `extra`.

    The engine runs nodes in descending order of their sequence numbers, so the calls in which the sorted nodes were
    made are in the order of their backward.
    """
    segments, of_segment, index, own = calls
    changed = np.empty(len(index), bool)
    changed[:1] = True
    changed[1:] = (index[1:] != index[:-1]) | (of_segment[1:] != of_segment[:-1]) | (own[1:] != own[:-1])
    if extra:
        changed |= np.isin(graph.numbers, list(extra))
    at = np.flatnonzero(changed)
    return CallChanges(
        [graph.nodes[node] for node in at.tolist()],
        graph.numbers[at].tolist(),
        [segments[of] for of in of_segment[at].tolist()],
        index[at].tolist(),
        own[at].tolist(),
    )


def _made_in_segment(
    numbers: Ints, maker: ThreadLog, segments: list[Segment | None], of_segment: Ints
) -> npt.NDArray[np.bool_]:
    """Returns, for each node, whether it was made while its segment ran, and not by a later backward through it."""
    end = np.iinfo(np.int64).max
    first = np.array([0 if segment is None else segment.first_seq for segment in segments], np.int64)
    last = np.array(
        [end if segment is None or segment.last_seq is None else segment.last_seq for segment in segments],
        np.int64,
    )
    own: npt.NDArray[np.bool_] = (first[of_segment] <= numbers) & (numbers < last[of_segment])
    elsewhere = np.array([segment is not None and segment.log is not maker for segment in segments])[
        of_segment
    ]
    for at in np.flatnonzero(elsewhere).tolist():  # these numbers were given on another thread
        own[at] = maker.has_made_for_forward(int(numbers[at]))
    return own


#: A call by the index of its segment among those of `NodeCalls`, and by its own index; -1 for none.
_Place = tuple[int, int]


def find_adding_nodes(
    graph: EngineGraph, outputs: list[Any], calls: NodeCalls
) -> Iterator[tuple[Any, CallRef | None]]:
    """Yields the nodes after which the engine adds their gradients to others of the same tensor.

    Each node comes with the innermost call around all sources of those gradients; None if there is none or it is
    not known.
    """
    common = _CommonCalls(calls.segments)
    fed: dict[Any, _Place] = dict.fromkeys(_fed_at_start(outputs, graph.edges), _NO_CALL)
    places = zip(calls.of_segment.tolist(), calls.call.tolist(), strict=True)
    for node, place in zip(graph.nodes, places, strict=True):
        met, adds = place, False
        for edge in graph.edges[node]:
            if edge[0] is None:
                continue
            before = fed.get(edge)
            if before is None:
                fed[edge] = place
            else:
                adds, fed[edge] = True, common.of(before, place)
                met = common.of(met, before)
        if adds:
            yield node, common.call(met)


class _CommonCalls:
    """Finds the innermost calls that contain two calls."""

    def __init__(self, segments: Sequence[Segment | None]) -> None:
        self._segments = segments
        self._parents: dict[int, list[int]] = {}  # by index of segment
        self._calls: dict[_Place, CallRef | None] = {_NO_CALL: None}

    def of(self, one: _Place, other: _Place) -> _Place:
        """Returns the innermost call that contains both calls. A call begins after those that contain it."""
        if one == other:
            return one
        (segment, first), (elsewhere, second) = one, other
        if self._segments[segment] is not self._segments[elsewhere] or first < 0 or second < 0:
            return _NO_CALL
        parents = self._parents.get(segment)
        if parents is None:
            parents = self._parents[segment] = self._parents_in(segment)
        while first != second:
            if first > second:
                first = parents[first]
            else:
                second = parents[second]
        return _NO_CALL if first < 0 else (segment, first)

    def call(self, place: _Place) -> CallRef | None:
        """Returns a call; None if there is none."""
        if place not in self._calls:
            segment = self._segments[place[0]]
            self._calls[place] = None if segment is None or place[1] < 0 else CallRef(segment, place[1])
        return self._calls[place]

    def _parents_in(self, segment: int) -> list[int]:
        found = self._segments[segment]
        return [] if found is None else np.asarray(found.parents).tolist()


_NO_CALL = (0, -1)


def _walk(roots: list[Any]) -> tuple[list[Any], list[int], EdgesOfNodes]:
    edges: EdgesOfNodes = {}
    numbers: list[int] = []
    for node, number, below in walk_graph(roots):
        if number != ACCUMULATE_SEQUENCE_NR:
            numbers.append(number)
            edges[node] = below
    return list(edges), numbers, edges


def calls_of_nodes(owner: ThreadLog, numbers: Ints) -> tuple[list[Segment | None], Ints, Ints]:
    """Returns the segments and, for each node in descending order, the indices of its segment and of its call."""
    segments: list[Segment | None] = [None]
    of_segment = np.zeros(len(numbers), np.int64)
    index = np.full(len(numbers), -1, np.int64)
    spans = owner.spans
    starts = np.array([span.first_seq for span in spans], np.int64)
    at_span = np.searchsorted(starts, numbers, side="right") - 1
    edges = np.flatnonzero(np.diff(at_span)) + 1
    for begin, end in zip([0, *edges.tolist()], [*edges.tolist(), len(numbers)], strict=True):
        span = spans[at_span[begin]] if len(numbers) and at_span[begin] >= 0 else None
        if isinstance(span, Segment) and span.last_seq is not None:
            after = begin + int(np.count_nonzero(numbers[begin:end] >= span.last_seq))
            events = np.searchsorted(span.seqs, numbers[after:end], side="right") - 1
            found = span.structure().scope_after[events]
            index[after:end] = found
            of_segment[after:end] = np.where(found < 0, 0, len(segments))
            segments.append(span)
            end = after
        for at in range(begin, end):  # the node is in no span, in a running one, or in an outer one
            call = owner.call_of(int(numbers[at]))
            if call is not None:
                segments.append(call.segment)
                of_segment[at], index[at] = segments.index(call.segment), call.index
    return segments, of_segment, index


def _fed_at_start(outputs: list[Any], edges: EdgesOfNodes) -> set[Any]:
    """Returns the edges that receive a gradient before any node runs: those of the outputs themselves."""
    fed: set[Any] = set()
    leaves = set()
    with DisableTorchFunction():
        for output in outputs:
            if not isinstance(output, torch.Tensor):
                fed.add((getattr(output, "node", None), getattr(output, "output_nr", 0)))
            elif (node := grad_fn_of(output)) is not None:
                fed.add((node, output_nr_of(output)))
            else:
                leaves.add(id(output))
    if leaves:  # the graph may also lead to the accumulation of a leaf that is an output
        for edge in (edge for below in edges.values() for edge in below if edge[0] is not None):
            if edge[0]._sequence_nr() == ACCUMULATE_SEQUENCE_NR and id(edge[0].variable) in leaves:
                fed.add(edge)
    return fed
