"""Places the items of one level in rows, each below the items that it reads, in order of time."""

from .rows import RowStack
from .sizes import COLUMN_GAP, HALF, ROW_GAP
from .work import AT_ONCE, ENTRANT, WITH_LEAVES, Twins, Work

# A row that is taller than this is followed by another one for the leaves of the next item.
_TALL = 40.0


class LevelPlacer:
    """Places the items of one level. The position of an item depends only on the items before it."""

    def __init__(self, work: Work, level: int, twins: Twins) -> None:
        self._work = work
        self._level = level
        self._heights = twins.heights_in(work, level)
        self._is_phase = twins.is_phase
        self._rows = RowStack()
        self._channels: dict[int, tuple[float, int]] = {}  # of each source: where, and down to which row

    def run(self) -> None:
        """Places all items, and leads the edges that leave the level to its border."""
        items = self._work.tree.children[self._level]
        self._place_in_order(items)
        self._place_rest(items)
        self._let_out()
        self._measure()

    def _place_in_order(self, items: list[int]) -> None:
        """Places all items except those that wait for a reader.

        A node that reads only one item, in the last row, is placed below it right here. Most nodes do, and `_place`
        takes three times as long (50,000 nodes of a chain: 170 ms instead of 60 ms).
        """
        work, rows = self._work, self._rows
        waits, is_aside, first, read_by = work.waits, work.is_aside, work.into.first, work.into.read
        entering, last_row, xs, ys = work.entering.first, work.last_row, work.x, work.y
        left, right, height = work.left, work.right, work.height
        nodes, heights, tops, add = work.tree.nodes, self._heights, rows.top, rows.add
        for item in items:
            if waits[item] != AT_ONCE:
                continue
            at = first[item]
            if first[item + 1] == at + 1 and item < nodes and entering[item] == entering[item + 1]:
                read, row = read_by[at], len(tops)
                if row and last_row[read] == row - 1 and not is_aside[item]:
                    xs[item] = x = xs[read]
                    add(heights.get(item, 0.0), height[item], x - left[item], x + right[item])
                    ys[item], last_row[item] = tops[row], row
                    continue
            self._place(item)

    def _place_rest(self, items: list[int]) -> None:
        """Places the items that nothing in the level has read, each after the items it reads."""
        last_row, waits = self._work.last_row, self._work.waits
        rest = [item for item in items if last_row[item] < 0]
        for item in sorted(rest, key=waits.__getitem__):
            if last_row[item] < 0:
                self._place(item)

    def _place(self, item: int) -> None:
        """Places an item below its inputs, and the inputs that waited for it directly above it."""
        row, wanted, waiting = self._look_above(item)
        if waiting:
            has_entrant = any(self._work.waits[each] == ENTRANT for each in waiting)
            is_first = wanted is None and (has_entrant or not self._work.entering.has(item))
            aside = (wanted or 0.0) + (0.0 if is_first else COLUMN_GAP)
            row = self._place_waiting(waiting, row, aside, is_first)
        if row and self._work.is_aside[item]:
            wanted = (wanted or 0.0) + HALF + COLUMN_GAP + self._work.left[item]
        self._put(item, row, wanted or 0.0)

    def _look_above(self, item: int) -> tuple[int, float | None, list[int]]:
        """Returns the row below all inputs of an item, their leftmost column, and the inputs that still wait."""
        work, into, row, wanted = self._work, self._work.into, 0, None
        waiting: list[int] = []
        for at in range(into.first[item], into.first[item + 1]):
            read = into.read[at]
            last = work.last_row[read]
            if last >= 0:
                if last >= row:
                    row = last + 1
                if wanted is None or work.x[read] < wanted:
                    wanted = work.x[read]
            elif work.waits[read] != AT_ONCE and read not in waiting:
                waiting.append(read)
        return row, wanted, waiting

    def _place_waiting(self, waiting: list[int], row: int, aside: float, is_first: bool) -> int:
        """Places the inputs that waited for an item in the rows above it, and returns the row of the item.

        Those that are placed aside leave the column free for the line from the item's other inputs.
        """
        waiting.sort(key=self._work.waits.__getitem__)
        deeper = [
            each
            for item in waiting
            if self._work.waits[item] == WITH_LEAVES
            for each in self._look_above(item)[2]
        ]
        deeper = list(dict.fromkeys(deeper))
        own_row = max(row - 1, 1 if deeper else 0, *(self._look_above(item)[0] for item in waiting))
        rows = self._rows
        if row >= len(rows) > own_row and rows.bottom[own_row] - rows.top[own_row] > _TALL:
            own_row = row + (1 if deeper else 0)
        for each in deeper:
            self._put_aside(each, own_row - 1, aside, is_first)
            own_row = max(own_row, self._work.last_row[each] + 1)
        waiting = [each for each in waiting if each not in deeper]
        for each in waiting:
            read = self._look_above(each)[1]
            self._put_aside(each, own_row, aside if read is None else max(read, aside), is_first)
        return max(row, *(self._work.last_row[each] + 1 for each in (*deeper, *waiting)))

    def _put_aside(self, item: int, row: int, aside: float, is_first: bool) -> None:
        """Places a leaf to the right of `aside`, at the bottom of its row if there is space."""
        work, rows = self._work, self._rows
        self._put(item, row, aside if is_first else aside + work.left[item])
        room = rows.bottom[work.last_row[item]] - work.y[item] - work.height[item]
        if work.last_row[item] == row and room > 0:
            work.y[item] += room

    def _put(self, item: int, row: int, wanted: float) -> None:
        """Places an item in a row, near the column `wanted`, and leads its edges to it."""
        work, rows = self._work, self._rows
        if item < work.tree.nodes:
            row = rows.find_row(row)
        elif not self._is_phase[item - work.tree.nodes]:
            row = rows.find_row_of_box(row)
        left, right, height = work.left[item], work.right[item], work.height[item]
        if row == len(rows.top):
            rows.add(self._heights.get(item, 0.0), height, wanted - left, wanted + right)
            x, last = wanted, row
        else:
            x, last = self._fit_in(item, row, wanted)
            rows.take(row, last, x - left, x + right)
        work.x[item], work.y[item], work.last_row[item] = x, rows.top[row], last
        into, entering = work.into, work.entering
        for at in range(into.first[item], into.first[item + 1]):
            read = into.read[at]
            if not row or work.last_row[read] != row - 1 or work.x[read] != x:
                self._lead(into.edge[at], read, row, x)
        if row:
            for at in range(entering.first[item], entering.first[item + 1]):
                self._lead_through(entering.edge[at], (0, row - 1), x, x)

    def _fit_in(self, item: int, row: int, wanted: float) -> tuple[float, int]:
        """Returns the position of an item in an existing row, and the last row that it occupies."""
        work, rows = self._work, self._rows
        is_box = item >= work.tree.nodes
        if is_box and row < len(rows.top) - 1:
            x = rows.find_place_below(row, wanted, work.left[item])
            return x, rows.reach_down(row, work.height[item])
        last = rows.reach_down(row, work.height[item])
        return rows.find_place(row, last, wanted, work.left[item], work.right[item], may_grow=is_box), last

    def _lead(self, edge: int, read: int, row: int, x: float) -> None:
        """Draws an edge from an item through the rows above the row of its target, at `x`."""
        work, rows = self._work, self._rows
        from_row, source_x = work.last_row[read], work.x[read]
        if from_row < 0:  # what is read comes later: the line goes back up
            work.looping.setdefault(self._level, []).append(edge)
            return
        if source_x != x and work.y[read] + work.height[read] + 1.0 < rows.bottom[from_row]:
            work.bends.add(edge, self._level, source_x, rows.bottom[from_row])
        if row - from_row > 1:
            self._lead_through(edge, (from_row + 1, row - 1), x, source_x)

    def _lead_through(self, edge: int, between: tuple[int, int], x: float, source_x: float) -> None:
        """Draws an edge down several rows. Edges of one source share a channel."""
        work, rows, (first, last) = self._work, self._rows, between
        source = work.source[edge]
        channel, down_to = self._channels.get(source, (x, first - 1))
        if down_to < last:
            begin = max(down_to + 1, first)
            found = rows.find_channel(begin, last, (channel,) if down_to >= first else (x, source_x))
            if found != channel and begin > first:
                found = rows.find_channel(first, last, (x, source_x))
                begin = first
            channel = found
            rows.take(begin, last, channel - 3.0, channel + 3.0)
            self._channels[source] = channel, last
        if channel != x or channel != source_x:
            top = rows.bottom[first - 1] + ROW_GAP / 2 if first else 0.0
            work.bends.add(edge, self._level, channel, top)
            work.bends.add(edge, self._level, channel, rows.bottom[last] + ROW_GAP / 2)

    def _let_out(self) -> None:
        """Leads the edges that leave the level down to its bottom."""
        work = self._work
        for edge, item in work.leaving.get(self._level, ()):
            if work.last_row[item] >= 0:
                self._lead(edge, item, len(self._rows), work.x[item])

    def _measure(self) -> None:
        """Sets the size of the level to that of its contents. Edges that go back up have lanes at its right side."""
        work, rows = self._work, self._rows
        item = work.tree.nodes + self._level
        left, right = HALF, HALF
        if len(rows):
            left, right = max(left, -min(rows.start)), max(right, max(rows.end))
        for edge in work.looping.get(self._level, ()):
            right += 8.0
            work.lanes.add(edge, self._level, right, 0.0)
        work.left[item], work.right[item] = left, right
        work.content_height[self._level] = max(rows.bottom[-1] if len(rows) else 0.0, 0.0)
