"""Tracks for the memory of a step whether it holds finite, intended infinite, unmeasured or bad values."""

from collections import defaultdict
from collections.abc import Iterable
from functools import cached_property, reduce
from itertools import chain
from operator import or_
from typing import NamedTuple

import numpy as np

from ..tables.columns import Column, Rows
from ..tables.one_step import MemoryRegion, OneStep
from .region_tree import RegionTree

#: Kinds of values, from the best to the worst: all finite; with infinities that were written on purpose, as in masks;
#: not measured; with other values that are not finite ("bad").
CLEAN, MEANT, UNSEEN, BAD = range(4)

#: A set of events, with a bit for the number of each: many tensors hold the values of many events.
Events = int


class Finiteness(NamedTuple):
    """The kind of values in a tensor or a part of memory, with their origin."""

    kind: int = CLEAN
    #: The origin of the values: for BAD the events that contributed to them, for MEANT the number of the constant, for
    #: UNSEEN the tensor that was written; -1 if it is not known.
    origin: int = -1

    @property
    def events(self) -> Events:
        """The events that contributed to bad values."""
        return self.origin if self.kind == BAD else 0


class Memory:
    """The state of all parts of memory that are not known to be finite."""

    def __init__(self, step: OneStep) -> None:
        self._tensors, self._regions = step.tensors, step.regions
        self._found_regions: dict[int, list[MemoryRegion]] = {}
        #: By storage, the states of what ops wrote there.
        self._writes: dict[int, RegionTree[Finiteness]] = {}
        self._doubted: set[int] = set()  # storages of which nothing is known any more
        self._unwritten: dict[int, list[int]] = {}  # by storage: tensors not yet written in full
        #: By storage, the events whose values no op has read since they were written there, and the tensors with them.
        self._unread: dict[int, RegionTree[Events]] = {}
        self._unread_at: dict[tuple[int, MemoryRegion], list[tuple[int, Events]]] = defaultdict(list)

    @cached_property
    def _by_storage(self) -> tuple[Rows, Column]:
        """The tensors in the order of their storages, and these."""
        rows = np.argsort(self._tensors.memory, kind="stable")
        return rows, self._tensors.memory[rows]

    def find_in_storage(self, storage: int) -> list[int]:
        """Returns the tensors in a storage, as `storage_of` gives it."""
        rows, storages = self._by_storage
        first, end = np.searchsorted(storages, (storage, storage + 1))
        in_storage: list[int] = rows[first:end].tolist()
        return in_storage

    def _find_regions(self, storage: int) -> list[MemoryRegion]:
        """Returns the regions of all tensors in a storage, and the whole of it up to the end of the last one."""
        if storage not in self._found_regions:
            regions = [self._regions[tensor] for tensor in self.find_in_storage(storage)]
            stop = max(region.stop for region in regions)
            whole = regions[0]._replace(start=0, stop=stop, is_dense=True)
            self._found_regions[storage] = [*regions, whole]
        return self._found_regions[storage]

    @property
    def written(self) -> list[int]:
        """The tensors in storages to which values were written that are not known to be finite."""
        return sorted(chain.from_iterable(map(self.find_in_storage, self._writes)))

    def read(self, tensor: int) -> Finiteness:
        """Returns the state of a tensor as it is now."""
        writes = self._writes.get(self.storage_of(tensor))
        return Finiteness() if writes is None else writes.join_overlapping(self._regions[tensor])

    def write(self, tensor: int, state: Finiteness) -> None:
        """Sets the state of a tensor that was written."""
        region, storage = self._regions[tensor], self.storage_of(tensor)
        if state.kind != CLEAN or storage in self._writes:
            writes = self._writes_to(storage)
            for covered in writes.find_within(region) if region.is_dense else ():
                writes[covered] = Finiteness()
            writes[region] = state
        if storage in self._unwritten:
            unwritten = self._unwritten[storage]
            self._unwritten[storage] = [one for one in unwritten if not _covers(region, self._regions[one])]

    def _writes_to(self, storage: int) -> RegionTree[Finiteness]:
        if storage not in self._writes:
            self._writes[storage] = RegionTree(self._find_regions(storage), Finiteness(), _join)
        return self._writes[storage]

    def doubt(self, tensor: int) -> None:
        """Marks, once for each storage, all the memory that a tensor shows a part of as unknown."""
        storage = self.storage_of(tensor)
        if storage not in self._doubted:
            self._doubted.add(storage)
            writes, whole = self._writes_to(storage), self._find_regions(storage)[-1]
            writes[whole] = _join(writes[whole], Finiteness(UNSEEN))

    def keep_unread(self, tensor: int, events: Events) -> None:
        """Remembers a tensor that holds the values of events and that no op has read."""
        region, storage = self._regions[tensor], self.storage_of(tensor)
        if storage not in self._unread:
            self._unread[storage] = RegionTree(self._find_regions(storage), 0, or_)
        self._unread[storage][region] |= events
        self._unread_at[storage, region].append((tensor, events))

    def mark_read(self, tensor: int, events: Events) -> None:
        """Forgets which tensors with values of these events share memory with `tensor`, as an op reads it now."""
        storage = self.storage_of(tensor)
        if storage in self._unread:
            unread = self._unread[storage]
            for region in unread.find_overlapping(self._regions[tensor], lambda held: held & events):
                unread[region] &= ~events
                held = [(one, left & ~events) for one, left in self._unread_at[storage, region]]
                self._unread_at[storage, region] = [(one, left) for one, left in held if left]

    def list_unread(self) -> list[tuple[int, Events]]:
        """Returns the tensors with values of events that no op has read since, each with these events."""
        return list(chain.from_iterable(self._unread_at.values()))

    def allocate(self, tensor: int) -> None:
        """Marks a tensor as allocated and not yet written."""
        self.write(tensor, Finiteness())
        self._unwritten.setdefault(self.storage_of(tensor), []).append(tensor)

    def find_unwritten(self, tensor: int) -> int | None:
        """Returns a tensor that was allocated without values and shares memory with `tensor`; None if there is none.

        Tensors that ops have written in full since their allocation do not count.
        """
        allocated = self._unwritten.get(self.storage_of(tensor), ())
        region = self._regions[tensor]
        return next((one for one in allocated if _overlap(self._regions[one], region)), None)

    def storage_of(self, tensor: int) -> int:
        """Returns the storage of a tensor; if it is not known, a negative number that is unique to the tensor."""
        return int(self._tensors.memory[tensor])


def join_states(states: Iterable[Finiteness]) -> Finiteness:
    """Returns the worst of some states; for bad ones, with the events of all of them."""
    return reduce(_join, states, Finiteness())


def list_events(events: Events) -> list[int]:
    """Returns the numbers of the events of a set, in order."""
    octets = events.to_bytes((events.bit_length() + 7) // 8, "little")
    numbers: list[int] = np.flatnonzero(
        np.unpackbits(np.frombuffer(octets, np.uint8), bitorder="little")
    ).tolist()
    return numbers


def set_of_events(are_in: Iterable[bool]) -> Events:
    """Returns the set of the events for which this is true, in the order of their numbers."""
    return int.from_bytes(np.packbits(np.fromiter(are_in, bool), bitorder="little").tobytes(), "little")


def _join(one: Finiteness, other: Finiteness) -> Finiteness:
    if one.kind == other.kind == BAD:
        return one if one == other else Finiteness(BAD, one.origin | other.origin)
    return max(one, other)


def _overlap(one: MemoryRegion, other: MemoryRegion) -> bool:
    return one.start < other.stop and other.start < one.stop


def _covers(one: MemoryRegion, other: MemoryRegion) -> bool:
    return one == other or (one.is_dense and one.start <= other.start and other.stop <= one.stop)
