"""Remembers one storage while it lives, with the tensors that show its present version."""

import weakref
from typing import Any

#: The number for "no op has written to it".
NO_OP = -1

#: Python objects of tensors that are remembered for one version of a storage.
_OBJECTS_KEPT = 64

#: The size of a storage that does not give it as a number.
UNKNOWN_SIZE = -1

_NONE = -1


def size_of(stored: Any) -> int:
    """Returns the size of a storage in bytes; UNKNOWN_SIZE if it is symbolic, or a subclass of the user's raises."""
    try:
        size = stored.nbytes()
    except Exception:
        return UNKNOWN_SIZE
    return size if type(size) is int and 0 <= size < 2**63 else UNKNOWN_SIZE


class KnownStorage:
    """A storage with the tensor objects that show it, each with its offset, its geometry and its number."""

    __slots__ = (
        "device", "geometry", "is_made", "key", "live_bytes", "number", "object", "offset", "others", "ref",
        "size_bytes", "tensor", "version", "writer",
    )  # fmt: skip

    def __init__(self, stored: Any, device: int, size_bytes: int, *, is_made: bool) -> None:
        self.is_made = is_made  # an op has made it
        self.number = -1
        self.device = device
        self.size_bytes = size_bytes  # when it was last asked; UNKNOWN_SIZE
        self.live_bytes = 0  # its part of `TensorIds.live_bytes`
        self.key = id(stored)
        self.ref = weakref.ref(stored)
        #: How often it has been written to: torch's own count misses `.data`, fused optimizers ...
        self.version = 0
        self.writer = NO_OP  # the op that wrote to it last
        # The first tensor, which is the only one most often: its `id`, what it shows, and its number.
        self.object = self.offset = self.geometry = self.tensor = _NONE
        self.others: dict[int, tuple[int, int, int]] | None = None  # by `id`: offset, geometry, number

    def find(self, key: int, offset: int, geometry: int) -> int | None:
        """Returns the number of a tensor object, or of the first object with the same offset and geometry."""
        others = self.others or {}
        known = others.get(key)
        if known is not None and known[0] == offset and known[1] == geometry:
            return known[2]
        if self.object != _NONE and self.offset == offset and self.geometry == geometry:
            return self.tensor
        for known in others.values():
            if known[0] == offset and known[1] == geometry:
                return known[2]
        return None

    def remember(self, key: int, offset: int, geometry: int, number: int) -> None:
        """Remembers the offset, the geometry and the number of the tensor object whose `id` is `key`."""
        if self.object in (_NONE, key):
            self.object, self.offset, self.geometry, self.tensor = key, offset, geometry, number
            return
        if self.others is None or (len(self.others) >= _OBJECTS_KEPT and key not in self.others):
            self.others = {}
        self.others[key] = (offset, geometry, number)

    def note_write(self, op: int) -> None:
        """Counts a write by an op. An op counts once, however many tensors it writes through."""
        if self.writer != op:
            self.version += 1
            self.writer = op
            self.object = _NONE
            self.others = None


class StorageLife:
    """An attribute of a storage, which dies with it; `_storages.c` explains why it is no weak reference."""

    __slots__ = ("_owner", "_storage")

    def __init__(self, storage: KnownStorage, owner: "weakref.ref[Any]") -> None:
        self._storage = storage
        self._owner = owner  # its `remove()` is called at the death

    def __reduce__(self) -> Any:
        return type(None), ()  # a copy is None

    def __del__(self) -> None:
        owner = self._owner()
        if owner is not None and self._storage.ref() is None:  # otherwise the attribute was removed
            owner.remove(self._storage)
