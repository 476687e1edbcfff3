"""Charges ops and calls with the memory that autograd nodes keep for backward."""

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from ...recording.phase import OPTIMIZER
from ..log.nesting import Ints
from ..log.segments import Segment
from ..log.thread_log import ThreadLog
from ..scopes.locate import Location
from .calls import OpCalls
from .joined import JoinedOps
from .mode import FLAGS, GRAD_MODE, SEQUENCE, START_NS
from .nodes import NodesOfOps
from .saved_memory import UNKNOWN, SavedForBackward

Bools = npt.NDArray[np.bool_]

NO_OP = -1


class Charges(NamedTuple):
    """The bytes that ops and calls are charged with."""

    of_op: Ints  # by op; UNKNOWN: what it keeps is not known
    is_unseen: Bools  # by op: it has made nodes, and no backward has come to them
    call_id: Ints  # by node that a backward has come to: the call that is charged
    size_bytes: Ints  # by node; UNKNOWN: not known


class _Kept(NamedTuple):
    """The findings of backwards about the nodes of one thread: each node once, in ascending order."""

    node: Ints
    size_bytes: Ints
    is_function: Bools
    call_id: Ints  # of the call that made it
    ended_ns: Ints  # the latest time at which an op of its forward may have begun


def charge_ops(
    found: JoinedOps, nodes: NodesOfOps, calls: OpCalls, saved: Sequence[SavedForBackward]
) -> Charges:
    """Charges each node to the op that has made it.

    The ops in the forward of a user's autograd Function make no nodes. What the Function keeps is charged to the first
    of them. A node without an op to charge is charged to the call that made it.
    """
    is_unseen = (nodes.made >= 0) | nodes.is_unclear
    of_op = np.where(is_unseen, UNKNOWN, 0)
    begins_function = _begin_functions(found, nodes, calls)
    if begins_function.any():  # most steps have no such Function, and spare a walk of 0.3 ms over 1,400 ops
        is_unseen |= begins_function & _may_keep(found)
    by_node = [(np.zeros(0, np.int64), np.zeros(0, np.int64))]
    for thread, kept in _join(saved):
        rows = np.flatnonzero(calls.thread == thread)
        op = _find_ops(rows, kept, found.events, nodes, begins_function)
        has_op = op != NO_OP
        charged, size_bytes, call_id = op[has_op], kept.size_bytes[has_op], kept.call_id.copy()
        call_id[has_op] = calls.call_id[charged]
        by_node.append((call_id, kept.size_bytes))
        of_op[charged] = 0
        np.add.at(of_op, charged, size_bytes)
        of_op[charged[size_bytes == UNKNOWN]] = UNKNOWN
        is_known = has_op | ~kept.is_function
        is_unseen[rows] &= ~np.isin(found.events[rows, SEQUENCE] - 1, kept.node[is_known])
        is_unseen[charged] = False
    of_op[is_unseen] = UNKNOWN
    call_id, size_bytes = (np.concatenate(column) for column in zip(*by_node, strict=True))
    return Charges(of_op, is_unseen, call_id, size_bytes)


def _begin_functions(found: JoinedOps, nodes: NodesOfOps, calls: OpCalls) -> Bools:
    """Returns whether each op is the first in the forward of an autograd Function, or of several nested ones.

    Grad mode is off there, and since the thread's last op a node has been numbered that no op made. That node may also
    belong to an earlier op that has written into a view.
    """
    coming = found.events[:, SEQUENCE]
    begins: Bools = (coming > nodes.before) & ((found.events[:, FLAGS] & GRAD_MODE) == 0)
    for thread in np.unique(calls.thread) if begins.any() else ():
        rows = np.flatnonzero(calls.thread == thread)
        begins[rows] &= ~np.isin(coming[rows] - 1, nodes.made[rows])  # a hook packs what the op keeps
    return begins


def _may_keep(found: JoinedOps) -> Bools:
    """Returns whether an autograd Function that begins at an op may be in a graph. Node numbers do not show that."""
    may = np.zeros(len(found.events), bool)
    for batch, first in zip(found.batches, found.firsts, strict=True):
        for begin, end, run in batch.runs():
            where: Any = run.where
            if type(where) is Segment:
                may[first + begin : first + end] = where.with_grad
            elif type(where) is ThreadLog:
                may[first + begin : first + end] = run.backward.create_graph
            else:
                may[first + begin : first + end] = type(where) is not Location or where.phase != OPTIMIZER
    return may


def _find_ops(rows: Ints, kept: _Kept, events: Ints, nodes: NodesOfOps, begins_function: Bools) -> Ints:
    """Returns the op that is charged with each node; NO_OP if there is none."""
    op = np.full(len(kept.node), NO_OP)
    if not len(rows):
        return op
    made = nodes.made[rows]
    at = np.minimum(np.searchsorted(kept.node, made), len(kept.node) - 1)
    is_it = kept.node[at] == made
    op[at[is_it]] = rows[is_it]
    functions = np.flatnonzero(kept.is_function & (op == NO_OP))
    after = np.searchsorted(events[rows, SEQUENCE], kept.node[functions], side="right")
    functions, after = functions[after < len(rows)], after[after < len(rows)]
    first = rows[after]
    is_inside = (
        begins_function[first]
        & (nodes.before[first] <= kept.node[functions])
        & (events[first, START_NS] < kept.ended_ns[functions])
    )
    op[functions[is_inside]] = first[is_inside]
    return op


def _join(saved: Sequence[SavedForBackward]) -> Iterator[tuple[int, _Kept]]:
    """Yields what several backwards have found, by thread. If several reached a node, the first one counts."""
    for thread in dict.fromkeys(found.thread for found in saved):
        parts = [_kept_of(found) for found in saved if found.thread == thread]
        _, at = np.unique(np.concatenate([part.node for part in parts]), return_index=True)
        yield thread, _Kept(*(np.concatenate(column)[at] for column in zip(*parts, strict=True)))


def _kept_of(saved: SavedForBackward) -> _Kept:
    owners = saved.owners
    call_id = np.full(len(saved.node), -1, np.int64)
    ended_ns = np.full(len(saved.node), np.iinfo(np.int64).max)
    for of, segment in enumerate(owners.segments):
        here = np.flatnonzero((owners.of_segment == of) & (owners.index >= 0))
        if segment is not None and segment.first_id is not None and len(here):
            call_id[here] = segment.first_id + owners.index[here]
            ended_ns[here] = segment.times[segment.structure().exit_event[owners.index[here]]]
    # Ops of compiled code may be unseen. Inside its call any later op is charged; outside of calls none is.
    ended_ns[saved.is_compiled & (call_id < 0)] = -1
    return _Kept(saved.node, saved.size_bytes, saved.is_function, call_id, ended_ns)
