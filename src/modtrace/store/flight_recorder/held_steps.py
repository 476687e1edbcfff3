"""Holds the rows of the last steps in memory, until they are written or too old."""

from collections import deque
from collections.abc import Iterator, Mapping
from itertools import islice

from ...recording.triggers.tensor_rows import Batch, Columns, TensorRows
from .held_tensors import HeldTensor
from .joined_steps import JoinedSteps

#: The number of steps whose rows are joined.
_JOINED_STEPS = 64
#: Steps that take more together are not joined, because the objects of their columns take little beside their rows.
_JOINED_BYTES = 64 * 2**20
#: They take at most this part of what may be held, because their rows go together, with the last of them.
_JOINED_SHARE = 16


class HeldSteps:
    """The last steps that have ended, at most `keep` of them, and the step whose rows are being received."""

    def __init__(self, keep: int, max_bytes: int) -> None:
        """Creates an empty store.

        Args:
            keep: the number of steps to hold.
            max_bytes: the limit of the rows' bytes, above which the oldest steps are dropped. The last step always
                stays.
        """
        self._keep = keep
        self._max_bytes = max_bytes
        self._ended: deque[HeldStep] = deque()
        self._apart = 0  # the number of the last ended steps whose rows are not joined
        self._open = HeldStep()
        self._tensor_rows = TensorRows()
        self.size_bytes = 0
        self.seen = 0  # the number of steps that ended since they were last taken
        self.cut = 0  # the number of steps dropped because of `max_bytes` that `keep` would have held

    def __len__(self) -> int:
        return len(self._ended)

    def add(self, table: str, columns: Columns, tensors: Mapping[str, HeldTensor]) -> None:
        """Adds rows of the step that is being written, with the whole tensors that they refer to."""
        size_bytes = sum(column.get_total_buffer_size() for column in columns.values())
        size_bytes += sum(tensor.array.nbytes for tensor in tensors.values())
        self._open.batches.append((table, columns))
        self._open.tensors.update(tensors)
        self._open.size_bytes += size_bytes
        self.size_bytes += size_bytes

    def end_step(self, number: int) -> None:
        """Closes the open step, whose rows have all been received."""
        ended, self._open = self._open, HeldStep()
        ended.number = number
        self._tensor_rows.see(number, ended.batches)
        self._ended.append(ended)
        self._apart += 1
        self.seen += 1
        self.cut = max(self.cut - 1, 0)
        while len(self._ended) > self._keep:
            self._drop_oldest()
        while self.size_bytes + self._tensor_rows.size_bytes > self._max_bytes and len(self._ended) > 1:
            self._drop_oldest()
            self.cut = self._keep - len(self._ended)
        if self._apart == _JOINED_STEPS:
            self._apart = 0
            self._join(list(islice(reversed(self._ended), _JOINED_STEPS))[::-1])

    def make_room(self, count: int) -> None:
        """Drops the oldest steps until there is room for `count` further ones."""
        while self._ended and len(self._ended) + count > self._keep:
            self._drop_oldest(is_replaced=False)

    def take(self) -> "Iterator[HeldStep]":
        """Yields the held steps from the oldest on, and finally a step that has only some of its rows.

        Each step is dropped when the next one is requested. Remove the batches from it that you have written.
        """
        carried = self._tensor_rows.take()
        self.seen = self.cut = self._apart = 0
        if self._open.batches:
            self._ended.append(self._open)
            self._open = HeldStep()
        if self._ended:
            self._ended[0].batches[:0] = [("tensors", columns) for columns in carried]
        while self._ended:
            step = self._ended[0]
            yield step  # after an interrupt, its remaining batches are yielded again
            if self._ended and self._ended[0] is step:  # a signal handler may have taken all in between
                self._ended.popleft()
                self.size_bytes -= step.size_bytes

    def clear(self) -> None:
        """Drops all steps."""
        self._ended.clear()
        self._apart = 0
        self._open = HeldStep()
        self._tensor_rows = TensorRows()
        self.size_bytes = 0

    def _join(self, steps: list["HeldStep"]) -> None:
        """Puts the rows of steps together."""
        size_bytes = sum(step.size_bytes for step in steps)
        if size_bytes <= min(_JOINED_BYTES, self._max_bytes // _JOINED_SHARE):
            batches = [list(step.batches) for step in steps]
            joined = JoinedSteps(batches)
            for place, step in enumerate(steps):
                step.join(joined, place, batches[place])

    def _drop_oldest(self, *, is_replaced: bool = True) -> None:
        dropped = self._ended.popleft()
        self._apart = min(self._apart, len(self._ended))
        self.size_bytes -= dropped.size_bytes
        self._tensor_rows.drop(dropped.number, dropped.batches, is_replaced=is_replaced)


class HeldStep:
    """The batches of one step."""

    __slots__ = ("_batches", "_joined", "number", "size_bytes", "tensors")

    def __init__(self) -> None:
        self.number = -1  # unknown while its rows arrive
        self._batches: list[Batch] = []
        self._joined: tuple[JoinedSteps, int] | None = None  # with the place of the step there
        self.tensors: dict[str, HeldTensor] = {}
        self.size_bytes = 0

    @property
    def batches(self) -> list[Batch]:
        """The batches, from which those are removed that were written."""
        known = self._joined
        if known is not None:
            joined, place = known
            batches = joined.batches_of(place)
            # A signal handler may have written them meanwhile; none runs between these lines, as they call nothing.
            if self._joined is known:
                self._joined, self._batches = None, batches
        return self._batches

    def join(self, joined: JoinedSteps, place: int, batches: list[Batch]) -> None:
        """Drops `batches`, because `joined` holds their rows, unless a signal handler has written some meanwhile."""
        if self._batches == batches:
            self._joined, self._batches = (joined, place), []
