"""Holds a value for each region of one storage, and joins the values of regions that overlap another."""

from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator
from typing import Generic, TypeVar

from ..tables.one_step import MemoryRegion

_Value = TypeVar("_Value")

#: The smallest stop of no regions, and their largest.
_NONE_FIRST, _NONE_LAST = 1 << 63, -1


class RegionTree(Generic[_Value]):
    """The values of some regions, which are known beforehand, as a binary tree.

    Its leaves are the regions in the order of their starts. Each node has the joined value of the regions below it that
    have one, and between which bounds these end. What is asked and written takes some log2(n) nodes of n regions, and
    as many for each region that is found.
    """

    def __init__(
        self, regions: Iterable[MemoryRegion], empty: _Value, join: Callable[[_Value, _Value], _Value]
    ) -> None:
        """Starts with the value `empty` for all regions, which stands for none."""
        self._regions = sorted(set(regions), key=lambda region: (region.start, region.stop))
        self._leaf = {region: number for number, region in enumerate(self._regions)}
        self._starts = [region.start for region in self._regions]
        self._empty, self._join = empty, join
        self._width = 1 << (len(self._regions) - 1).bit_length()  # of the row of leaves
        self._values = [empty] * (2 * self._width)
        self._first_stop = [_NONE_FIRST] * (2 * self._width)
        self._last_stop = [_NONE_LAST] * (2 * self._width)

    def __getitem__(self, region: MemoryRegion) -> _Value:
        return self._values[self._width + self._leaf[region]]

    def __setitem__(self, region: MemoryRegion, value: _Value) -> None:
        node = self._width + self._leaf[region]
        is_empty = value == self._empty
        self._values[node] = value
        self._first_stop[node] = _NONE_FIRST if is_empty else region.stop
        self._last_stop[node] = _NONE_LAST if is_empty else region.stop
        while node > 1:
            node //= 2
            left, right = 2 * node, 2 * node + 1
            self._values[node] = self._join(self._values[left], self._values[right])
            self._first_stop[node] = min(self._first_stop[left], self._first_stop[right])
            self._last_stop[node] = max(self._last_stop[left], self._last_stop[right])

    def join_overlapping(self, region: MemoryRegion) -> _Value:
        """Returns the joined value of the regions that share elements with this one, judging by their bounds."""
        joined, end = self._empty, bisect_left(self._starts, region.stop)
        for node in self._find(0, end, region.start, _NONE_FIRST - 1, splits=False):
            joined = self._join(joined, self._values[node])
        return joined

    def find_overlapping(self, region: MemoryRegion, wants: Callable[[_Value], object]) -> list[MemoryRegion]:
        """Returns the regions with a wanted value that share elements with this one; a joined value is asked first."""
        end = bisect_left(self._starts, region.stop)
        nodes = self._find(0, end, region.start, _NONE_FIRST - 1, splits=True, wants=wants)
        return [self._regions[node - self._width] for node in nodes]

    def find_within(self, region: MemoryRegion) -> list[MemoryRegion]:
        """Returns the regions with a value that lie inside of this one, judging by their bounds."""
        first = bisect_left(self._starts, region.start)
        nodes = self._find(first, self._width, _NONE_LAST, region.stop, splits=True)
        return [self._regions[node - self._width] for node in nodes]

    def _find(
        self,
        first: int,
        end: int,
        above: int,
        most: int,
        *,
        splits: bool,
        wants: Callable[[_Value], object] = lambda _: True,
    ) -> Iterator[int]:
        """Yields the leaves from `first` to before `end` whose regions stop above `above` and at `most` at the most.

        Unless it `splits`, nodes stand for the leaves below them where these are all found.
        """
        nodes = [(1, 0, self._width)]
        while nodes:
            node, begin, width = nodes.pop()
            if (
                begin >= end
                or begin + width <= first
                or self._last_stop[node] <= above
                or self._first_stop[node] > most
                or not wants(self._values[node])
            ):
                continue
            is_whole = first <= begin and begin + width <= end
            are_found = is_whole and self._first_stop[node] > above and self._last_stop[node] <= most
            if width == 1 or (are_found and not splits):
                yield node
            else:
                half = width // 2
                nodes += [(2 * node, begin, half), (2 * node + 1, begin + half, half)]
