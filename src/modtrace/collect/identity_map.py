"""Maps objects that others own to values, without keeping the objects alive."""

import weakref
from collections.abc import Iterator
from typing import Any, Generic, TypeVar

Key = TypeVar("Key")
Value = TypeVar("Value")


class IdentityMap(Generic[Key, Value]):
    """A mapping from objects to values that uses neither the hash of an object nor its `==`.

    It replaces `weakref.WeakKeyDictionary`, whose weak references have callbacks: if an object has two of those, and a
    garbage collection frees one of them while the object dies, CPython calls a freed callback (Objects/weakrefobject.c,
    3.11). Here a reference without a callback shows that an `id` is used again, and the entries of dead objects are
    removed when the number of entries has doubled, or by `sweep()`.
    """

    def __init__(self) -> None:
        self._items: dict[int, tuple[weakref.ref[Any], Value]] = {}
        self._most = 16  # the number of entries that triggers the next sweep

    def get(self, key: Key) -> Value | None:
        """Returns the value of an object; None if it has none."""
        return self.of_id(id(key))

    def of_id(self, number: int) -> Value | None:
        """Returns the value of the living object with this `id`; None if there is none."""
        known = self._items.get(number)
        return None if known is None or known[0]() is None else known[1]

    def __setitem__(self, key: Key, value: Value) -> None:
        if len(self._items) >= self._most:
            self.sweep()
            self._most = max(16, 2 * len(self._items))
        self._items[id(key)] = (weakref.ref(key), value)

    def pop(self, key: Key) -> Value | None:
        """Removes an object, and returns its value; None if it has none."""
        known = self._items.pop(id(key), None)
        return None if known is None or known[0]() is None else known[1]

    def items(self) -> Iterator[tuple[Key, Value]]:
        """Yields the living objects and their values, even if the mapping changes meanwhile."""
        for ref, value in list(self._items.values()):
            key = ref()
            if key is not None:
                yield key, value

    def sweep(self) -> None:
        """Removes the entries of dead objects."""
        for number, known in list(self._items.items()):
            if known[0]() is None and self._items.get(number) is known:
                del self._items[number]

    def clear(self) -> None:
        """Removes all entries."""
        self._items = {}
