"""Defines the numbers of the autograd nodes that one backward makes on one thread."""

from bisect import bisect_right
from typing import Any

from .segments import CallRef


class BackwardSpan:
    """The numbers of the nodes that one backward makes (`create_graph`), with the call to which each belongs."""

    __slots__ = ("asked_by", "first_seq", "last_seq", "outer", "seqs", "targets")

    def __init__(self, first_seq: int, outer: Any) -> None:
        self.first_seq = first_seq
        self.last_seq: int | None = None
        self.outer = outer
        #: The call whose forward began the backward on another thread; all nodes of the span belong to it.
        self.asked_by: CallRef | None = None
        self.seqs: list[int] = []  # ascending; empty unless backward events are taken
        self.targets: list[CallRef | None] = []

    def call_at(self, sequence_nr: int) -> CallRef | None:
        """Returns the call to which the node belongs; None if it is not known."""
        at = bisect_right(self.seqs, sequence_nr) - 1
        return self.targets[at] if at >= 0 else self.asked_by

    def has_made(self, sequence_nr: int) -> bool:
        """Returns whether the node with this number of the span's thread was made while the backward ran."""
        return self.first_seq <= sequence_nr and (self.last_seq is None or sequence_nr < self.last_seq)

    def is_needed(self) -> bool:
        """Returns False: spans are dropped by age alone, because no hook runs when a gradient's graph is freed."""
        return False
