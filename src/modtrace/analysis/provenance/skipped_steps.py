"""Finds steps in which no optimizer used the gradients, as when a GradScaler has found an overflow."""

from dataclasses import replace
from functools import cached_property

import numpy as np

from ...recording.phase import BACKWARD, OPTIMIZER, PHASES
from ...recording.role import GRAD_INPUT, GRAD_OUTPUT, LOSS, PARAMETER_GRAD
from ...recording.triggers.step_conditions import SKIPS_WINDOW, Use, are_many_skipped
from ..tables.columns import Column, column_of, phase_codes
from ..tables.indexed_tables import IndexedTables
from ..tables.op_rules import UNSCALES
from ..tables.ops import bare_name
from ..values.nonfinite import OVERFLOW, NonFinite


class SkippedSteps:
    """The steps whose backward's gradients no optimizer used, if one runs in a later step or a GradScaler is used.

    If no optimizer runs later, the program may have stopped because of these gradients.
    """

    def __init__(self, run: IndexedTables, use: Use | None = None) -> None:
        """Starts without reading anything.

        Args:
            run: the recording.
            use: what became of the gradients of the only step, if the recording has just one.
        """
        self._run = run
        self._use = use

    def __contains__(self, step: int) -> bool:
        return self._use.skipped > 0 if self._use is not None else bool(np.isin(step, self._skipped))

    def count(self, step: int) -> tuple[int, int]:
        """Returns how many of the last steps up to `step` were skipped, and how many steps were counted."""
        if self._use is not None:
            return self._use.skipped, self._use.steps
        last = self._trained[self._trained <= step][-SKIPS_WINDOW:]
        return int(np.isin(last, self._skipped).sum()), len(last)

    def are_many(self, step: int) -> bool:
        """Returns whether too many of the last steps were skipped for a lower scale to help."""
        return are_many_skipped(self.count(step)[0])

    def find_many(self) -> tuple[int, int]:
        """Returns `count` of the last training step if `are_many` is true of it; else zeros."""
        last = 0 if self._use is not None else int(self._trained.max(initial=0))
        return self.count(last) if self.are_many(last) else (0, 0)

    @cached_property
    def _trained(self) -> Column:
        return np.union1d(self._find(BACKWARD, GRAD_OUTPUT, GRAD_INPUT, PARAMETER_GRAD), self._used)

    @cached_property
    def _skipped(self) -> Column:
        unused: Column = np.setdiff1d(self._trained, self._used)
        return unused if self.has_scaler else unused[unused < self._used.max(initial=-1)]

    @cached_property
    def has_scaler(self) -> bool:
        """True if an op looks for overflows on behalf of a GradScaler."""
        names = self._run.data.table("ops")["name"].unique().to_pylist()
        return UNSCALES in map(bare_name, names)

    @cached_property
    def _used(self) -> Column:
        """The steps in which an optimizer ran; parameters' gradients are measured when one begins."""
        return self._find(OPTIMIZER, PARAMETER_GRAD)

    def _find(self, phase: str, *roles: str) -> Column:
        """Returns the steps with ops of a phase, or with tensors of some roles."""
        values, ops = self._run.data.table("values"), self._run.data.table("ops")
        has_role = np.isin(column_of(values, "site_id"), self._run.sites_of(*roles))
        has_phase = phase_codes(ops["phase"]) == PHASES.index(phase)
        return np.asarray(np.union1d(column_of(values, "step")[has_role], column_of(ops, "step")[has_phase]))


def is_gradient(answer: NonFinite) -> bool:
    """Returns whether the values are in a gradient, or in a loss that a GradScaler scaled until it overflowed."""
    is_scaled_loss = answer.role == LOSS and not answer.nan_count
    return answer.phase == BACKWARD or answer.role == PARAMETER_GRAD or is_scaled_loss


def keep_if_many_skipped(answers: list[NonFinite], skipped: SkippedSteps) -> list[NonFinite]:
    """Returns overflows of unused gradients if there are many such steps, so that lowering the scale does not help."""
    if not answers or not skipped.are_many(answers[0].step):
        return []
    count, last = skipped.count(answers[0].step)
    hint = f"no optimizer used the gradients of {count} of the last {last} steps"
    remedy = (
        "they overflow at every scale of the GradScaler: use bfloat16, or compute what overflows in float32"
    )
    return [replace(answer, hint=hint, remedy=remedy) for answer in answers]


def is_expected(answer: NonFinite) -> bool:
    """Returns whether a gradient overflowed, so that a GradScaler will skip the step and lower its scale.

    NaN, and values that are infinite at any scale, would not go away by that.
    """
    return answer.phase == BACKWARD and not answer.nan_count and answer.cause in (None, OVERFLOW)
