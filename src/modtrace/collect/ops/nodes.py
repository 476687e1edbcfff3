"""Finds the autograd node that an op has made or works for, and the forward op of a backward op."""

from collections.abc import Callable
from copy import copy
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from ..log.nesting import Ints
from .joined import JoinedOps
from .mode import CUSTOM_NODE, FLAGS, GRAD_MODE, NODE, OP, PACKS, SCHEMA, SEQUENCE, OpRun

NO_NODE = -1

#: At least this many forward ops of each thread are remembered, for backwards in later steps.
_KEPT = 20_000


class NodesOfOps(NamedTuple):
    """The sequence numbers of autograd nodes, one entry for each op; NO_NODE if there is none or it is unknown."""

    node: Ints  # that a forward op has made, or that a backward op works for
    thread: npt.NDArray[np.int32]  # that numbered it
    forward_op: Ints  # of a backward op: the one that made the node
    made: Ints  # that the op has made: a backward op may make one, too (`create_graph`)
    before: Ints  # the number that came next before the op: what has come since is of the op, or of what is around it
    is_unclear: npt.NDArray[np.bool_]  # it may have made one, and it is not known which


class _Made(NamedTuple):
    """The nodes that ops of one thread have made, in order, with these ops."""

    node: Ints
    op: Ints
    writes: npt.NDArray[np.bool_]


class OpNodes:
    """Follows the numbers of autograd nodes through the ops.

    A node is numbered before its op reaches the dispatcher, so the next number has risen by then. One more node is made
    after an op that writes into a view (`CopySlices`). The node of a user's autograd Function belongs to no op, because
    the ops inside run without grad mode.
    """

    def __init__(self, thread: int, sequence: int) -> None:
        """Creates the follower. `sequence` is the number that the thread's next node gets."""
        self._made: dict[int, _Made] = {}  # by thread
        self._next: dict[int, int] = {thread: sequence}  # by thread: the number that came next at the last op

    def copy(self) -> "OpNodes":
        """Returns a follower that goes on from here, and leaves this one as it is."""
        other = copy(self)
        other._made, other._next = dict(self._made), dict(self._next)
        return other

    def of(
        self,
        found: JoinedOps,
        writes: npt.NDArray[np.bool_],
        differentiable: npt.NDArray[np.bool_],
        writes_into_view: Callable[[int], bool],
    ) -> NodesOfOps:
        """Returns the nodes of ops.

        Args:
            writes: by number of schema, whether the op writes to an argument.
            differentiable: by op, whether it may make a node at all.
            writes_into_view: returns whether the op of a row writes into a view, which adds one or two nodes after it.
        """
        size = len(found.events)
        none = np.full(size, NO_NODE)
        nodes = NodesOfOps(
            none, np.zeros(size, np.int32), none.copy(), none.copy(), none.copy(), np.zeros(size, bool)
        )
        for begin, end, run in found.threads():
            rows = slice(begin, end)
            nodes.thread[rows] = run.thread
            self._follow(found.events[rows], run, nodes, rows, writes, differentiable[rows], writes_into_view)
        return nodes

    def _follow(
        self,
        events: Ints,
        run: OpRun,
        found: NodesOfOps,
        rows: slice,
        writes: npt.NDArray[np.bool_],
        differentiable: npt.NDArray[np.bool_],
        writes_into_view: Callable[[int], bool],
    ) -> None:
        coming = events[:, SEQUENCE]
        before = np.concatenate([[self._next.get(run.thread, coming[0])], coming[:-1]])
        self._next[run.thread] = int(coming[-1])
        worked_for = events[:, NODE] != NO_NODE
        with_grad = (events[:, FLAGS] & GRAD_MODE) != 0
        # Where more than one number has come there is more to it: a view that was made again, a `CopySlices`.
        has_made = (coming == before + 1) & with_grad & differentiable
        may_follow = (coming > before + 1) & (coming <= before + 3) & with_grad & differentiable
        for at in np.flatnonzero(may_follow).tolist():
            has_made[at] = writes_into_view(rows.start + at - 1)
        packs = with_grad & ((events[:, FLAGS] & PACKS) != 0)
        if packs.any():
            _claim_packed(has_made, packs, coming, int(before[0]))
        found.made[rows] = np.where(has_made, coming - 1, NO_NODE)
        found.before[rows] = before
        found.is_unclear[rows] = (coming > before) & with_grad & differentiable & ~has_made
        is_forward = has_made & ~worked_for
        found.node[rows] = np.where(is_forward, coming - 1, events[:, NODE])
        if is_forward.any():
            made = events[is_forward]
            self._add(run.thread, _Made(made[:, SEQUENCE] - 1, made[:, OP], writes[made[:, SCHEMA]]))
        if worked_for.any():
            owner = run.node_thread
            found.thread[rows] = owner
            is_custom = (events[:, FLAGS] & CUSTOM_NODE) != 0
            forward = np.where(is_custom, NO_NODE, self._find(owner, events[:, NODE]))
            found.forward_op[rows] = np.where(worked_for, forward, NO_NODE)

    def _add(self, thread: int, new: _Made) -> None:
        known = self._made.get(thread)
        if known is not None:
            keep = 0 if len(known.node) < 2 * _KEPT else _KEPT
            new = _Made(*(np.concatenate([old[keep:], late]) for old, late in zip(known, new, strict=True)))
        self._made[thread] = new

    def _find(self, thread: int, nodes: Ints) -> Ints:
        made = self._made.get(thread)
        if made is None:
            return np.full(len(nodes), NO_NODE)
        at = np.searchsorted(made.node, nodes, side="right") - 1
        distance = nodes - made.node[at]  # `at` -1 is the last one, of a larger number
        is_it = (at >= 0) & ((distance == 0) | ((distance == 1) & made.writes[at]))
        return np.where(is_it, made.op[at], NO_NODE)


def _claim_packed(
    has_made: npt.NDArray[np.bool_], packs: npt.NDArray[np.bool_], coming: Ints, first: int
) -> None:
    """Assigns nodes to ops whose hooks on saved tensors have run other ops first, to pack what the node saves.

    Args:
        has_made: by op, whether it is known to have made a node; changed in place.
        packs: by op, whether hooks pack what it saves.
        coming: by op, the number that the next node would get.
        first: that number before the first op.
    """
    claimed = first - 1  # the last node that an op has made
    for at in range(len(coming)):
        if not has_made[at] and packs[at] and coming[at] - 1 > claimed:
            has_made[at] = True
        if has_made[at]:
            claimed = int(coming[at]) - 1
