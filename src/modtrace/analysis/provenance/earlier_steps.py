"""What is known of the tensors of earlier steps: what made their values, also of steps whose rows are dropped."""

from collections import OrderedDict
from collections.abc import Mapping
from itertools import pairwise

#: Nothing is known about tensors in at most this many ranges.
_MOST_RANGES = 64

#: Something is kept of at most this many tensors, the last ones.
_MOST_TENSORS = 100_000


class EarlierSteps:
    """The tensors of dropped steps that are not known to be finite, by id."""

    def __init__(self, *, is_complete: bool = False) -> None:
        """Knows nothing yet.

        Args:
            is_complete: all that ops return is measured in every step. Otherwise nothing is known to be finite.
        """
        self.is_complete = is_complete
        self._held: OrderedDict[int, str | None] = OrderedDict()
        self._forgotten = -1  # up to this tensor something may have been known
        self._unsearched: list[tuple[int, int]] = []  # the first and the last tensor of steps

    def is_finite(self, tensor_id: int) -> bool:
        """Returns whether a tensor is known to have been finite when its step ended."""
        is_unsearched = any(first <= tensor_id <= last for first, last in self._unsearched)
        is_known = self.is_complete and tensor_id > self._forgotten and not is_unsearched
        return is_known and tensor_id not in self._held

    def describe(self, tensor_id: int) -> str | None:
        """Returns what made the values that a tensor held: `log in Net made it in step 3`; None if nothing is known."""
        return self._held.get(tensor_id)

    def add(self, held: Mapping[int, str | None]) -> None:
        """Keeps what made the values of the tensors of a step; None for infinities that are meant."""
        self._held.update(held)
        while len(self._held) > _MOST_TENSORS:
            tensor_id, _ = self._held.popitem(last=False)
            self._forgotten = max(self._forgotten, tensor_id)

    def add_unsearched(self, first: int, last: int) -> None:
        """Keeps that nobody has followed the ops of a step, which made the tensors from one id to another.

        Of many steps those that are nearest to each other are joined, with what is between them.
        """
        ranges = self._unsearched
        ranges.append((first, last))
        if len(ranges) > _MOST_RANGES:
            gaps = [behind[0] - before[1] for before, behind in pairwise(ranges)]
            number = gaps.index(min(gaps))
            ranges[number : number + 2] = [(ranges[number][0], ranges[number + 1][1])]
