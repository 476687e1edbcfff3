"""Keeps calls inside of compiled code until their gradients have come."""

from itertools import count
from typing import Any

from ..log.segments import InsideCall

#: When this many calls are kept, those whose graphs are dead are forgotten.
_PRUNE_AT = 64


class AwaitedCalls:
    """Calls inside of compiled code whose gradients may still come, by numbers that compiled code can carry."""

    def __init__(self) -> None:
        self._calls: dict[int, tuple[InsideCall, Any]] = {}
        self._numbers = count()
        self._prune_at = _PRUNE_AT

    def add(self, call: InsideCall, kept: Any = None) -> int:
        """Keeps a call together with what its gradients will need, and returns its number."""
        if len(self._calls) >= self._prune_at:
            self._prune()
        number = next(self._numbers)
        self._calls[number] = call, kept
        return number

    def get(self, number: int) -> tuple[InsideCall | None, Any]:
        """Returns the call with this number, and what was kept with it; None for both if its graph is dead."""
        return self._calls.get(number, (None, None))

    def _prune(self) -> None:
        """Forgets calls whose gradients cannot come any more."""
        known = list(self._calls.items())  # a copy, as another thread may add calls
        segments = {call.segment for _, (call, _) in known}
        dead = {segment for segment in segments if segment.is_closed and not segment.has_graph()}
        for number, (call, _) in known:
            if call.segment in dead:
                self._calls.pop(number, None)
        self._prune_at = 2 * len(self._calls) + _PRUNE_AT
