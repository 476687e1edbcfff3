"""Counts calls of modules inside of compiled code, which hooks do not see."""

from bisect import bisect_right
from collections import Counter
from collections.abc import Sequence


class InsideCalls:
    """The tapped calls inside of compiled code of one segment.

    Each recording and each tracker has its own set of taps (`taps` below), and counts separately. The number of a
    module's calls is the highest count of any set.
    """

    __slots__ = ("_begun", "_places")

    def __init__(self) -> None:
        #: By module_id and taps, for each call: how many calls that hooks see had begun at its end. It never falls.
        self._begun: dict[int, dict[int, list[int]]] = {}
        #: By index of the surrounding call that hooks see, taps and module_id: the positions of calls in those lists.
        self._places: dict[tuple[int, int, int], list[int]] = {}

    def __bool__(self) -> bool:
        return bool(self._begun)

    def add(self, seen: int, taps: int, module_id: int, begun: int) -> int:
        """Adds a call that has ended inside of the call `seen`.

        Returns:
            the number of earlier calls of the module inside `seen`, by the same taps.
        """
        known = self._begun.setdefault(module_id, {}).setdefault(taps, [])
        places = self._places.setdefault((seen, taps, module_id), [])
        places.append(len(known))
        known.append(begun)
        return len(places) - 1

    def find(self, seen: int, taps: int, module_id: int, nth: int) -> tuple[int, int] | None:
        """Returns the call's number among those of its module, and how many calls that hooks see had begun.

        None if these taps did not see the call.
        """
        places = self._places.get((seen, taps, module_id), ())
        return (places[nth], self._begun[module_id][taps][places[nth]]) if nth < len(places) else None

    def count_before(self, module_id: int, seen: int) -> int:
        """Returns how many inside calls of a module had ended when the call `seen` began."""
        return bisect_right(self._most(module_id), seen)

    def counts(self) -> Counter[int]:
        """Returns the number of known calls of each module, by module_id."""
        return Counter({module_id: len(self._most(module_id)) for module_id in list(self._begun)})

    def _most(self, module_id: int) -> Sequence[int]:
        return max(self._begun.get(module_id, {}).values(), key=len, default=())
