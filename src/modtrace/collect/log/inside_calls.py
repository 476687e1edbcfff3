"""Counts the calls of modules in compiled code, where hooks see none."""

from bisect import bisect_right
from collections import Counter
from collections.abc import Sequence


class InsideCalls:
    """The calls inside of compiled code in one segment, as far as taps have seen them.

    Several taps may see the same call. So what counts are the calls of the taps that have seen most of a module.
    """

    __slots__ = ("_begun", "_places")

    def __init__(self) -> None:
        #: By module_id and taps: how many calls of the segment had begun at the end of each call.
        self._begun: dict[int, dict[int, list[int]]] = {}
        #: By the seen call around them, taps and module_id: the places of calls among those.
        self._places: dict[tuple[int, int, int], list[int]] = {}

    def __bool__(self) -> bool:
        return bool(self._begun)

    def add(self, index: int, taps: int, module_id: int, begun: int) -> int:
        """Adds a call that has ended inside of the call `index`.

        Returns:
            the number of calls that the same taps saw before it of the same module inside of the call `index`.
        """
        known = self._begun.setdefault(module_id, {}).setdefault(taps, [])
        places = self._places.setdefault((index, taps, module_id), [])
        places.append(len(known))
        known.append(begun)
        return len(places) - 1

    def find(self, index: int, taps: int, module_id: int, nth: int) -> tuple[int, int] | None:
        """Returns the place of a call among those of its module, and how many calls of the segment had begun.

        None if the taps have not seen it.
        """
        places = self._places.get((index, taps, module_id), ())
        return (places[nth], self._begun[module_id][taps][places[nth]]) if nth < len(places) else None

    def count_before(self, module_id: int, index: int) -> int:
        """Returns how many calls of a module had ended when the call `index` of the segment began."""
        return bisect_right(self._most(module_id), index)

    def counts(self) -> Counter[int]:
        """Returns how many calls of each module are known, by module_id."""
        return Counter({module_id: len(self._most(module_id)) for module_id in list(self._begun)})

    def _most(self, module_id: int) -> Sequence[int]:
        return max(self._begun.get(module_id, {}).values(), key=len, default=())
