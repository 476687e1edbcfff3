"""Decides whether a GradScaler skips so many steps that no scale helps."""

from typing import NamedTuple

#: A scaler tries the largest scale again and again, so that it skips a step now and then, and several at the
#: beginning. As many as `_MANY` of the last `SKIPS_WINDOW` steps show that the gradients overflow at every scale.
SKIPS_WINDOW, _MANY = 20, 10


class Use(NamedTuple):
    """What becomes of the gradients of a step."""

    #: An optimizer uses them, or its steps are skipped too often; False: this one is skipped; None: the rows tell.
    is_used: bool | None
    skipped: int = 0  # steps of the last ...
    steps: int = 0  # ... so many


def are_many_skipped(count: int) -> bool:
    """Returns whether so many of the last steps were skipped that lowering the scale does not help."""
    return count >= _MANY
