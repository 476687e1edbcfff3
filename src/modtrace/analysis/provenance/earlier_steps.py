"""Keeps what is known of the tensors of earlier steps, even of steps whose rows were dropped."""

from collections import OrderedDict
from collections.abc import Mapping
from itertools import pairwise

#: The largest number of ranges of tensors whose steps were not searched.
_MOST_RANGES = 64

#: The largest number of tensors that are remembered; the latest are kept.
_MOST_TENSORS = 100_000


class EarlierSteps:
    """The tensors of dropped steps that are not known to be finite, by id."""

    def __init__(self, *, is_complete: bool = False) -> None:
        """Starts with nothing known.

        Args:
            is_complete: whether all outputs of ops are measured in every step; if not, no tensor is known to be finite.
        """
        self.is_complete = is_complete
        self._held: OrderedDict[int, str | None] = OrderedDict()
        self._forgotten = -1  # the last tensor that may have been remembered and forgotten again
        self._unsearched: list[tuple[int, int]] = []  # first and last tensor of each range

    def is_finite(self, tensor_id: int) -> bool:
        """Returns whether a tensor is known to have been finite when its step ended."""
        is_unsearched = any(first <= tensor_id <= last for first, last in self._unsearched)
        is_known = self.is_complete and tensor_id > self._forgotten and not is_unsearched
        return is_known and tensor_id not in self._held

    def describe(self, tensor_id: int) -> str | None:
        """Returns what made the values that a tensor held: `log in Net made it in step 3`; None if it is not known."""
        return self._held.get(tensor_id)

    def add(self, held: Mapping[int, str | None]) -> None:
        """Remembers what made the non-finite values of a step's tensors; None for infinities that are intended."""
        self._held.update(held)
        while len(self._held) > _MOST_TENSORS:
            tensor_id, _ = self._held.popitem(last=False)
            self._forgotten = max(self._forgotten, tensor_id)

    def add_unsearched(self, first: int, last: int) -> None:
        """Remembers that a step was not searched, whose ops made the tensors from the id `first` to the id `last`.

        If there are too many ranges, the two that are nearest to each other are joined, with the tensors between them.
        """
        ranges = self._unsearched
        ranges.append((first, last))
        if len(ranges) > _MOST_RANGES:
            gaps = [behind[0] - before[1] for before, behind in pairwise(ranges)]
            number = gaps.index(min(gaps))
            ranges[number : number + 2] = [(ranges[number][0], ranges[number + 1][1])]
