"""Counts the calls of modules in compiled code, where hooks see none."""

from bisect import bisect_right
from collections import Counter
from collections.abc import Sequence


class InsideCalls:
    """The calls inside of compiled code in one segment, as far as they were tapped.

    Each recording and each tracker has a set of taps with a number of its own (`taps` below), which counts alone. A
    module has as many calls as the set that saw most of them.
    """

    __slots__ = ("_begun", "_places")

    def __init__(self) -> None:
        #: By module_id and taps, of each call, at its end: how many calls that hooks see had begun. It never falls.
        self._begun: dict[int, dict[int, list[int]]] = {}
        #: By the index of the seen call around them, taps and module_id: the indices of calls in those lists.
        self._places: dict[tuple[int, int, int], list[int]] = {}

    def __bool__(self) -> bool:
        return bool(self._begun)

    def add(self, seen: int, taps: int, module_id: int, begun: int) -> int:
        """Adds a call that has ended inside of the call `seen`.

        Returns:
            the number of calls that the same taps saw before it of the same module inside of the call `seen`.
        """
        known = self._begun.setdefault(module_id, {}).setdefault(taps, [])
        places = self._places.setdefault((seen, taps, module_id), [])
        places.append(len(known))
        known.append(begun)
        return len(places) - 1

    def find(self, seen: int, taps: int, module_id: int, nth: int) -> tuple[int, int] | None:
        """Returns which of the calls of its module inside a call is, and how many calls that hooks see had begun.

        None if these taps have not seen it.
        """
        places = self._places.get((seen, taps, module_id), ())
        return (places[nth], self._begun[module_id][taps][places[nth]]) if nth < len(places) else None

    def count_before(self, module_id: int, seen: int) -> int:
        """Returns how many calls of a module had ended inside when the call `seen` began, before which `seen` did."""
        return bisect_right(self._most(module_id), seen)

    def counts(self) -> Counter[int]:
        """Returns how many calls of each module are known, by module_id."""
        return Counter({module_id: len(self._most(module_id)) for module_id in list(self._begun)})

    def _most(self, module_id: int) -> Sequence[int]:
        return max(self._begun.get(module_id, {}).values(), key=len, default=())
