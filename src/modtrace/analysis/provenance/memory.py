"""Tracks for the memory of a step whether it holds finite, intended infinite, unmeasured or bad values."""

from collections.abc import Iterable
from typing import NamedTuple

from ..tables.one_step import MemoryRegion, OneStep

#: Kinds of values, from the best to the worst: all finite; with infinities that were written on purpose, as in masks;
#: not measured; with other values that are not finite ("bad").
CLEAN, MEANT, UNSEEN, BAD = range(4)


class Finiteness(NamedTuple):
    """The kind of values in a tensor or a part of memory, with their origin."""

    kind: int = CLEAN
    #: The origin of the values: for BAD the number of the event, for MEANT the number of the constant, for UNSEEN the
    #: tensor that was written; -1 if it is not known.
    origin: int = -1
    #: Further events that contributed to BAD values.
    others: frozenset[int] = frozenset()

    @property
    def origins(self) -> frozenset[int]:
        """The events that contributed to bad values."""
        return self.others | {self.origin} if self.kind == BAD else frozenset()


class Memory:
    """The state of all parts of memory that are not known to be finite."""

    def __init__(self, step: OneStep) -> None:
        self._regions = step.regions
        #: By storage, the tensors that ops wrote there, with their states.
        self._writes: dict[int, list[tuple[MemoryRegion, Finiteness]]] = {}
        self._doubted: set[int] = set()  # storages of which nothing is known any more
        self._unwritten: dict[int, list[int]] = {}  # by storage: tensors not yet written in full

    def read(self, tensor: int) -> Finiteness:
        """Returns the state of a tensor as it is now."""
        region, writes = self._regions[tensor], self._writes.get(self.storage_of(tensor), ())
        return join_states(state for written, state in writes if _overlap(written, region))

    def write(self, tensor: int, state: Finiteness) -> None:
        """Sets the state of a tensor that was written."""
        region, storage = self._regions[tensor], self.storage_of(tensor)
        kept = [write for write in self._writes.pop(storage, ()) if not _covers(region, write[0])]
        if state.kind != CLEAN:
            kept.append((region, state))
        if kept:
            self._writes[storage] = kept
        if storage in self._unwritten:
            unwritten = self._unwritten[storage]
            self._unwritten[storage] = [one for one in unwritten if not _covers(region, self._regions[one])]

    def doubt(self, tensor: int) -> None:
        """Marks, once for each storage, all the memory that a tensor shows a part of as unknown."""
        storage, own = self.storage_of(tensor), self._regions[tensor].storage
        if storage not in self._doubted:
            self._doubted.add(storage)
            stop = max(region.stop for region in self._regions if region.storage == own)
            whole = MemoryRegion(storage, 0, stop, is_dense=True)
            self._writes.setdefault(storage, []).append((whole, Finiteness(UNSEEN)))

    def allocate(self, tensor: int) -> None:
        """Marks a tensor as allocated and not yet written."""
        self.write(tensor, Finiteness())
        self._unwritten.setdefault(self.storage_of(tensor), []).append(tensor)

    def find_unwritten(self, tensor: int) -> int | None:
        """Returns a tensor that was allocated without values and shares memory with `tensor`; None if there is none.

        Tensors that ops have written in full since their allocation do not count.
        """
        allocated = self._unwritten.get(self.storage_of(tensor), ())
        return next((one for one in allocated if self.do_overlap(one, tensor)), None)

    def storage_of(self, tensor: int) -> int:
        """Returns the storage of a tensor; if it is not known, a negative number that is unique to the tensor."""
        storage = self._regions[tensor].storage
        return -1 - tensor if storage is None else storage

    def do_overlap(self, one: int, other: int) -> bool:
        """Returns whether two tensors of one storage may share elements, judging by their bounds."""
        return _overlap(self._regions[one], self._regions[other])


def join_states(states: Iterable[Finiteness]) -> Finiteness:
    """Returns the worst of some states; for bad ones, with the events of all of them."""
    joined = Finiteness()
    for state in states:
        if state.kind == joined.kind == BAD:
            joined = joined._replace(others=(joined.origins | state.origins) - {joined.origin})
        elif state.kind > joined.kind or (state.kind == joined.kind and state.origin > joined.origin):
            joined = state
    return joined


def _overlap(one: MemoryRegion, other: MemoryRegion) -> bool:
    return one.start < other.stop and other.start < one.stop


def _covers(one: MemoryRegion, other: MemoryRegion) -> bool:
    return one == other or (one.is_dense and one.start <= other.start and other.stop <= one.stop)
