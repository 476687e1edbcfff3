"""What is known of objects that others own, without keeping those alive."""

import weakref
from collections.abc import Iterator
from typing import Any, Generic, TypeVar

Key = TypeVar("Key")
Value = TypeVar("Value")


class IdentityMap(Generic[Key, Value]):
    """Values by object: neither the hash of an object nor its `==` is asked for.

    It has the place of `weakref.WeakKeyDictionary`, whose weak references have callbacks. If an object has two of
    those, and a garbage collection frees one of them while the object dies, CPython calls a freed callback
    (Objects/weakrefobject.c, 3.11). Here an `id` that is used again is told by a reference without callback, and what
    belongs to dead objects goes when their number has doubled, or at `sweep()`.
    """

    def __init__(self) -> None:
        self._items: dict[int, tuple[weakref.ref[Any], Value]] = {}
        self._most = 16  # entries, until the next sweep

    def get(self, key: Key) -> Value | None:
        """The value of an object."""
        return self.of_id(id(key))

    def of_id(self, number: int) -> Value | None:
        """The value of the living object that has this `id`."""
        known = self._items.get(number)
        return None if known is None or known[0]() is None else known[1]

    def __setitem__(self, key: Key, value: Value) -> None:
        if len(self._items) >= self._most:
            self.sweep()
            self._most = max(16, 2 * len(self._items))
        self._items[id(key)] = (weakref.ref(key), value)

    def pop(self, key: Key) -> Value | None:
        """Takes out the value of an object."""
        known = self._items.pop(id(key), None)
        return None if known is None or known[0]() is None else known[1]

    def items(self) -> Iterator[tuple[Key, Value]]:
        """The living objects and their values; may change meanwhile."""
        for ref, value in list(self._items.values()):
            key = ref()
            if key is not None:
                yield key, value

    def sweep(self) -> None:
        """Lets go of what belongs to dead objects."""
        for number, known in list(self._items.items()):
            if known[0]() is None and self._items.get(number) is known:
                del self._items[number]

    def clear(self) -> None:
        """Lets go of everything."""
        self._items = {}
