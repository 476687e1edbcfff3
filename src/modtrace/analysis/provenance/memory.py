"""Tracks which memory of a step holds finite values, intended infinities, unmeasured values, or bad ones."""

from collections.abc import Iterable
from typing import NamedTuple

from ..tables.one_step import MemoryRegion, OneStep

#: Kinds of values, from the best to the worst: all finite; with infinities that are written on purpose, as in masks;
#: not measured; with others that are not finite.
CLEAN, MEANT, UNSEEN, BAD = range(4)


class Finiteness(NamedTuple):
    """The values of a tensor, or of a part of memory."""

    kind: int = CLEAN
    #: Where they come from. Of BAD: the number of the event; of MEANT: that of the constant; of UNSEEN: the id of the
    #: tensor that was written. -1: not known.
    origin: int = -1
    #: Of BAD further events from which some of the values come.
    others: frozenset[int] = frozenset()

    @property
    def origins(self) -> frozenset[int]:
        """The events from which bad values come."""
        return self.others | {self.origin} if self.kind == BAD else frozenset()


class Memory:
    """The parts of memory that are not known to be finite."""

    def __init__(self, step: OneStep) -> None:
        self._regions = step.regions
        #: By storage: what ops have left there.
        self._writes: dict[int, list[tuple[MemoryRegion, Finiteness]]] = {}
        self._doubted: set[int] = set()  # storages
        self._unwritten: dict[int, list[int]] = {}  # by storage: tensors to which no op has written in full

    def read(self, tensor: int) -> Finiteness:
        """Returns what a tensor holds now."""
        region, writes = self._regions[tensor], self._writes.get(self.storage_of(tensor), ())
        return join_states(state for written, state in writes if _overlap(written, region))

    def write(self, tensor: int, state: Finiteness) -> None:
        """Notes what was written to a tensor."""
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
        """Notes, once for each storage, that nothing is known of all the memory that a tensor shows a part of."""
        storage, own = self.storage_of(tensor), self._regions[tensor].storage
        if storage not in self._doubted:
            self._doubted.add(storage)
            stop = max(region.stop for region in self._regions if region.storage == own)
            whole = MemoryRegion(storage, 0, stop, is_dense=True)
            self._writes.setdefault(storage, []).append((whole, Finiteness(UNSEEN)))

    def allocate(self, tensor: int) -> None:
        """Notes that nobody has written to a tensor."""
        self.write(tensor, Finiteness())
        self._unwritten.setdefault(self.storage_of(tensor), []).append(tensor)

    def find_unwritten(self, tensor: int) -> int | None:
        """Returns a tensor that was allocated without values, if `tensor` shares memory with it; None if there is none.

        Allocated tensors that ops have written in full since do not count.
        """
        allocated = self._unwritten.get(self.storage_of(tensor), ())
        return next((one for one in allocated if self.do_overlap(one, tensor)), None)

    def storage_of(self, tensor: int) -> int:
        """Returns the storage of a tensor; if that is not known, a negative number that no other tensor has."""
        storage = self._regions[tensor].storage
        return -1 - tensor if storage is None else storage

    def do_overlap(self, one: int, other: int) -> bool:
        """Returns whether two tensors of one storage have elements in common, as far as their bounds tell."""
        return _overlap(self._regions[one], self._regions[other])


def join_states(states: Iterable[Finiteness]) -> Finiteness:
    """Returns the worst of some states, of bad ones with the events of all."""
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
