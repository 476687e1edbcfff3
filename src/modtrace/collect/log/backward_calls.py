"""Records the backward of each call as columns: from the call's first autograd node to the next node outside of it."""

from typing import Any

from .segments import Segment


class BackwardCalls:
    """The calls of one run of the engine, in the order in which they began."""

    __slots__ = (
        "_is_open", "_open", "_parents", "above", "began", "end_ns", "ended", "index", "segment", "start_ns",
    )  # fmt: skip

    def __init__(self) -> None:
        self.segment: list[Segment] = []
        self.index: list[int] = []  # index of the forward call in its segment
        self.start_ns: list[int] = []
        self.end_ns: list[int] = []
        #: The device events at the beginnings and ends, if device times are taken.
        self.began: list[Any] = []
        self.ended: list[Any] = []
        self.above: list[int] = []  # the row of the surrounding call; -1 if it has no row here
        self._open: list[int] = []  # rows of the open calls, outermost first
        self._is_open: set[tuple[Segment, int]] = set()  # the open calls
        self._parents: dict[Segment, list[int]] = {}

    def __len__(self) -> int:
        return len(self.segment)

    @property
    def innermost(self) -> int:
        """The row of the innermost call whose backward runs; -1 if there is none."""
        return self._open[-1] if self._open else -1

    @property
    def open(self) -> frozenset[int]:
        """The rows of the calls whose backward has not ended."""
        return frozenset(self._open)

    def move(self, segment: Segment | None, index: int, now_ns: int, on_device: Any = None) -> None:
        """Ends the calls that the engine leaves, and begins those that it enters, when it goes on to another call.

        Args:
            segment: the segment of the call; None for nodes outside of any module.
            on_device: the device event that was recorded for this moment; None if there is none.
        """
        entered: list[int] = []
        if segment is None:
            index = -1
        else:
            parents = self._parents.get(segment)
            if parents is None:
                parents = self._parents[segment] = segment.structure().parent.tolist()
            while index >= 0 and (segment, index) not in self._is_open:
                entered.append(index)
                index = parents[index]
        segments, indexes, is_open = self.segment, self.index, self._open
        while is_open:
            row = is_open[-1]
            if indexes[row] == index and segments[row] is segment:
                break
            is_open.pop()
            self._is_open.discard((segments[row], indexes[row]))
            self.end_ns[row], self.ended[row] = now_ns, on_device
        for entered_call in reversed(entered):
            assert segment is not None
            self._begin(segment, entered_call, now_ns, on_device)

    def end(self, now_ns: int, on_device: Any = None) -> None:
        """Ends every call that is open."""
        while self._open:
            row = self._open.pop()
            self.end_ns[row], self.ended[row] = now_ns, on_device
        self._is_open.clear()

    def _begin(self, segment: Segment, index: int, now_ns: int, on_device: Any) -> None:
        is_open = self._open
        self.above.append(is_open[-1] if is_open else -1)
        is_open.append(len(self.segment))
        self._is_open.add((segment, index))
        self.segment.append(segment)
        self.index.append(index)
        self.start_ns.append(now_ns)
        self.end_ns.append(-1)
        self.began.append(on_device)
        self.ended.append(None)
