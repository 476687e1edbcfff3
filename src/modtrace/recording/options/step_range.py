"""The range of steps that is recorded: START:STOP[:EVERY]."""

from typing import NamedTuple

from ...surface import name_argument


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
    """Returns the range of steps for what a user gave.

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
    raise TypeError(
        f"{name_argument('steps', steps)}: give 'START:STOP[:EVERY]', a range or a slice, or None for all steps"
    )


def _parse(text: str) -> tuple[int | None, ...]:
    parts = text.split(":")
    try:
        numbers = tuple(int(part) if part.strip() else None for part in parts)
    except ValueError:
        numbers = ()
    if len(numbers) not in (2, 3):
        raise ValueError(
            f"{name_argument('steps', text)} is not START:STOP[:EVERY], such as 100:200 or 0::50"
        )
    return numbers


def _checked(parts: tuple[int | None, ...], given: object) -> StepRange:
    start, stop, every = (*parts, None)[:3]
    found = StepRange(start or 0, stop, 1 if every is None else every)
    if found.start < 0 or found.every < 1 or (found.stop is not None and found.stop <= found.start):
        raise ValueError(
            f"{name_argument('steps', given)} holds no step: START counts from 0, STOP lies beyond it, "
            "EVERY is at least 1"
        )
    return found
