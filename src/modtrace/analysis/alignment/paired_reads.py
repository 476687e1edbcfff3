"""Finds what ops of two recordings read as the same argument."""

import numpy as np

from ..tables.columns import RowFinder, Rows, number_codes
from .sides import Side


class PairedReads:
    """Finds the reads of the second recording, for those of the first; numbers of reads are those of `OpFlow`."""

    def __init__(self, a: Side, b: Side) -> None:
        self._flow = a.flow
        self._slot, slot_b = number_codes(*((each.flow.slots, each.flow.slot) for each in (a, b)))
        self._width = 1 + max(int(each.max(initial=0)) for each in (self._slot, slot_b))
        self._find = RowFinder(b.flow.reader * self._width + slot_b)

    def find(self, reads: Rows, partner: Rows) -> Rows:
        """Returns the read of the same argument of the partner of each reader; -1 for none.

        Args:
            reads: of the first recording.
            partner: of each op of that; -1 for none.
        """
        reader = partner[self._flow.reader[reads]]
        return self._find(np.where(reader >= 0, reader * self._width + self._slot[reads], -1))

    def find_all(self, partner: Rows) -> tuple[Rows, Rows]:
        """Returns all pairs of reads of ops that are partners."""
        reads = np.flatnonzero(partner[self._flow.reader] >= 0)
        there = self.find(reads, partner)
        return reads[there >= 0], there[there >= 0]
