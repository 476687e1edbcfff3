"""Selects steps by a range, a list, or a function of the user's."""

from collections.abc import Callable, Collection
from numbers import Integral  # numpy's too
from typing import Any, Protocol

from ...surface import name_argument
from .step_range import StepRange, to_step_range


class Schedule(Protocol):
    """A set of step numbers; its `str()` is stored in the recording."""

    def __contains__(self, number: object, /) -> bool:
        """Returns whether the schedule contains the step with this number."""


class StepList:
    """The steps in a list."""

    def __init__(self, numbers: Collection[int]) -> None:
        self._numbers = frozenset(numbers)

    def __contains__(self, number: object, /) -> bool:
        return number in self._numbers

    def __str__(self) -> str:
        return ",".join(str(number) for number in sorted(self._numbers)) or "none"


#: No steps, for captures that wait for a trigger.
NO_STEPS = StepList(())


class StepPredicate:
    """The steps that a function chooses. It is called once for each step; a step for which it raises is not chosen."""

    def __init__(self, choose: Callable[[int], Any]) -> None:
        self._choose = choose
        self._known: dict[int, bool] = {}
        self.error: Exception | None = None  # the first error that it has raised
        self.raised_at = -1  # the step for which it was raised

    def afresh(self) -> "StepPredicate":
        """Returns a schedule with the same function and without cached answers."""
        return StepPredicate(self._choose)

    def __contains__(self, number: object, /) -> bool:
        assert isinstance(number, int)
        known = self._known.get(number)
        if known is None:
            known = self._ask(number)
            if len(self._known) >= _REMEMBERED:
                self._known.pop(next(iter(self._known)), None)  # another thread may have been faster
            self._known[number] = known
        return known

    def _ask(self, number: int) -> bool:
        try:
            return bool(self._choose(number))
        except Exception as error:
            if self.error is None:
                self.error, self.raised_at = error, number
            return False

    def __str__(self) -> str:
        return f"function {getattr(self._choose, '__qualname__', repr(self._choose))}"


#: How many answers are cached. A step is looked up repeatedly until its rows are written.
_REMEMBERED = 4096


def to_schedule(steps: object) -> Schedule:
    """Returns the schedule for what a user gave.

    Args:
        steps: None for all; `"START:STOP[:EVERY]"`, a range or a slice; a list, tuple or set of numbers; a function
            that takes the number of a step and returns whether it is chosen.

    Raises:
        TypeError: `steps` is something else.
        ValueError: it contains no step.
    """
    if isinstance(steps, (list, tuple, set, frozenset)) and not isinstance(steps, StepRange):
        return StepList([int(each) for each in _checked_numbers(steps)])
    if steps is None or isinstance(steps, (str, range, slice, StepRange)):
        return to_step_range(steps)
    if callable(steps):
        return StepPredicate(steps)
    raise TypeError(
        f"{name_argument('steps', steps)}: give 'START:STOP[:EVERY]', a range, a slice, a list of numbers, "
        "a function of the step's number, or None for all steps"
    )


def _checked_numbers(steps: Collection[Any]) -> Collection[int]:
    if not steps:
        raise ValueError(
            f"{name_argument('steps', steps)} holds no step. Give at least one, or None for all."
        )
    for each in steps:
        if not isinstance(each, Integral) or isinstance(each, bool) or each < 0:
            raise ValueError(f"steps: {each!r} is no number of a step; they count from 0")
    return steps
