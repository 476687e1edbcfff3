"""Manages the rows of one level of a layout: their heights, and their occupied stretches."""

from .sizes import COLUMN_GAP, LINE_GAP, ROW_GAP, ROW_HEIGHT, WIDEST_ROW


class RowStack:
    """Rows from top to bottom. A row above another one never moves; a taller item occupies several rows.

    The occupied part of a row is one stretch, from the left end of its first item to the right end of its last.
    """

    def __init__(self) -> None:
        self.top: list[float] = []
        self.bottom: list[float] = []
        self.start: list[float] = []
        self.end: list[float] = []
        self._next: dict[int, int] = {}  # of a row that is full, one further down

    def __len__(self) -> int:
        return len(self.top)

    def add(self, lowest_top: float, height: float, left: float, right: float) -> None:
        """Adds a row that begins at `lowest_top` or further down, with an item in it."""
        top = self.bottom[-1] + ROW_GAP if self.bottom else 0.0
        if lowest_top > top:
            top = lowest_top
        self.top.append(top)
        self.bottom.append(top + (height if height > ROW_HEIGHT else ROW_HEIGHT))
        self.start.append(left)
        self.end.append(right)

    def find_row(self, row: int) -> int:
        """Returns the first row, from `row` on, that has space for another node."""
        if row == len(self.top) or self.end[row] <= WIDEST_ROW:
            return row
        passed = []
        while row < len(self.top) and self.end[row] > WIDEST_ROW:
            passed.append(row)
            row = self._next.get(row, row + 1)
        for each in passed:
            self._next[each] = row
        return row

    def find_row_of_box(self, row: int) -> int:
        """Returns the row for a box: this row if all rows from it on have space on the right, else the last row or a
        new one.
        """
        if row >= len(self.top) - 1 or max(self.end[row:]) > WIDEST_ROW:
            return self.find_row(max(row, len(self.top) - 1))
        return row

    def reach_down(self, row: int, height: float) -> int:
        """Returns the last row that an item of this height occupies. The last row of the stack grows if the item needs
        it.
        """
        bottoms = self.bottom
        bottom, last, behind = self.top[row] + height, row, len(bottoms) - 1
        while bottom > bottoms[last] and last < behind:
            last += 1
        if bottom > bottoms[last]:
            bottoms[last] = bottom
        return last

    def find_place(
        self, first: int, last: int, wanted: float, left: float, right: float, *, may_grow: bool
    ) -> float:
        """Returns the position for an item in these rows: at `wanted`, or right of their contents.

        An item that may grow to the right is not placed left of another one.
        """
        if first == last:
            start, end = self.start[first], self.end[first]
        else:
            start, end = min(self.start[first : last + 1]), max(self.end[first : last + 1])
        if wanted + right + COLUMN_GAP <= start and not may_grow:
            return wanted
        return max(wanted, end + COLUMN_GAP + left)

    def find_place_below(self, first: int, wanted: float, left: float) -> float:
        """Returns the position for an item that may grow to the right and down.

        It is right of everything from this row on.
        """
        return max(wanted, max(self.end[first:]) + COLUMN_GAP + left)

    def take(self, first: int, last: int, left: float, right: float) -> None:
        """Marks the positions from `left` to `right` as occupied in the rows `first` to `last`."""
        start, end = self.start, self.end
        for row in range(first, last + 1):
            if left < start[row]:
                start[row] = left
            if right > end[row]:
                end[row] = right

    def find_channel(self, first: int, last: int, wanted: tuple[float, ...]) -> float:
        """Returns the position for a line down these rows.

        It is the first of `wanted` that is free, or else right of all items.
        """
        start, end = min(self.start[first : last + 1]), max(self.end[first : last + 1])
        for x in wanted:
            if x - LINE_GAP >= end or x + LINE_GAP <= start:
                return x
        return end + LINE_GAP
