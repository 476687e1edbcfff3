"""Selects steps by a range, a list, or a function of the user."""

from collections.abc import Callable, Collection
from numbers import Integral  # includes numpy's integers
from typing import Any, NamedTuple, Protocol


class StepRange(NamedTuple):
    """Every `every`-th step from `start` up to but not including `stop`, which is None if there is no end."""

    start: int = 0
    stop: int | None = None
    every: int = 1

    def __contains__(self, number: object) -> bool:
        return (
            isinstance(number, int)
            and number >= self.start
            and (self.stop is None or number < self.stop)
            and (number - self.start) % self.every == 0
        )

    def __str__(self) -> str:
        text = f"{self.start}:{'' if self.stop is None else self.stop}"
        return text if self.every == 1 else f"{text}:{self.every}"


ALL_STEPS = StepRange()


def to_step_range(steps: object) -> StepRange:
    """Returns the range of steps for the user's argument.

    Args:
        steps: None for all; `"START:STOP"` or `"START:STOP:EVERY"`, where each part may be empty; a `range` or a
            `slice`.

    Raises:
        TypeError: `steps` is something else.
        ValueError: the text cannot be read, or a number in it makes no sense.
    """
    if steps is None or isinstance(steps, StepRange):
        return steps or ALL_STEPS
    if isinstance(steps, str):
        return _checked(_parse(steps), steps)
    if isinstance(steps, (slice, range)):
        parts = (steps.start, steps.stop, steps.step)
        return _checked(parts, steps)
    raise TypeError(f"steps={steps!r}: give 'START:STOP[:EVERY]', a range or a slice, or None for all steps")


def _parse(text: str) -> tuple[int | None, ...]:
    parts = text.split(":")
    try:
        numbers = tuple(int(part) if part.strip() else None for part in parts)
    except ValueError:
        numbers = ()
    if len(numbers) not in (2, 3):
        raise ValueError(f"steps={text!r} is not START:STOP[:EVERY], such as 100:200 or 0::50")
    return numbers


def _checked(parts: tuple[int | None, ...], given: object) -> StepRange:
    start, stop, every = (*parts, None)[:3]
    step_range = StepRange(start or 0, stop, 1 if every is None else every)
    if (
        step_range.start < 0
        or step_range.every < 1
        or (step_range.stop is not None and step_range.stop <= step_range.start)
    ):
        raise ValueError(
            f"steps={given!r} holds no step: START counts from 0, STOP lies beyond it, EVERY is at least 1"
        )
    return step_range


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
        self.error: Exception | None = None  # the first error that the function raised
        self.raised_at = -1  # the step for which it raised that error

    def afresh(self) -> "StepPredicate":
        """Returns a schedule with the same function and without cached answers."""
        return StepPredicate(self._choose)

    def __contains__(self, number: object, /) -> bool:
        assert isinstance(number, int)
        known = self._known.get(number)
        if known is None:
            known = self._choose_step(number)
            if len(self._known) >= _REMEMBERED:
                self._known.pop(next(iter(self._known)), None)  # another thread may have removed it
            self._known[number] = known
        return known

    def _choose_step(self, number: int) -> bool:
        try:
            return bool(self._choose(number))
        except Exception as error:
            if self.error is None:
                self.error, self.raised_at = error, number
            return False

    def __str__(self) -> str:
        return f"function {getattr(self._choose, '__qualname__', repr(self._choose))}"


#: The number of answers that are cached, because a step is looked up until its rows are written.
_REMEMBERED = 4096


def to_schedule(steps: object) -> Schedule:
    """Returns the schedule for the user's argument.

    Args:
        steps: None for all; `"START:STOP[:EVERY]"`, a range or a slice; a list, tuple or set of numbers; a function
            that takes the number of a step and returns whether it is chosen.

    Raises:
        TypeError: `steps` is something else.
        ValueError: it contains no step.
    """
    if isinstance(steps, (list, tuple, set, frozenset)) and not isinstance(steps, StepRange):
        if not steps:
            raise ValueError(f"steps={steps!r} holds no step. Give at least one, or None for all.")
        for step in steps:
            if not isinstance(step, Integral) or isinstance(step, bool) or step < 0:
                raise ValueError(f"steps: {step!r} is no number of a step; they count from 0")
        return StepList([int(step) for step in steps])
    if steps is None or isinstance(steps, (str, range, slice, StepRange)):
        return to_step_range(steps)
    if callable(steps):
        return StepPredicate(steps)
    raise TypeError(
        f"steps={steps!r}: give 'START:STOP[:EVERY]', a range, a slice, a list of numbers, "
        "a function of the step's number, or None for all steps"
    )
