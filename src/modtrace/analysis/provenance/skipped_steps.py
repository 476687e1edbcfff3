"""Finds the steps in which no optimizer used the gradients, as where a GradScaler has found that they overflow."""

from collections.abc import Sequence
from functools import cached_property

import numpy as np

from ...recording.phase import BACKWARD, OPTIMIZER, PHASES
from ...recording.role import GRAD_INPUT, GRAD_OUTPUT, PARAMETER_GRAD
from ...recording.triggers.skips import SKIPS_WINDOW, Use, are_many_skipped
from ..tables.columns import Column, column_of, phase_codes
from ..tables.op_rules import UNSCALES
from ..tables.ops import bare_name
from .indexed_tables import IndexedTables


class SkippedSteps:
    """The steps with a backward whose gradients no optimizer used, though one runs later, or a GradScaler looks on.

    Where no optimizer ran after a step, the program may have stopped because of its gradients.
    """

    def __init__(self, tables: IndexedTables, use: Use | None = None) -> None:
        """Reads nothing before it is asked.

        Args:
            tables: the recording.
            use: if it has a single step, what became of its gradients.
        """
        self._tables = tables
        self._use = use

    def __contains__(self, step: int) -> bool:
        if self._use is not None:
            return self._use.skipped > 0
        return bool(np.isin(step, self._skipped))

    def count(self, step: int) -> tuple[int, int]:
        """Returns how many of the last steps up to one were skipped, and how many steps these are."""
        if self._use is not None:
            return self._use.skipped, self._use.steps
        last = self._trained[self._trained <= step][-SKIPS_WINDOW:]
        return int(np.isin(last, self._skipped).sum()), len(last)

    def are_many(self, step: int) -> bool:
        """Returns whether so many of the last steps were skipped that lowering the scale does not help."""
        return are_many_skipped(self.count(step)[0])

    def find_many(self) -> tuple[int, int]:
        """Returns `count` of the last step if so many were skipped; else zeros."""
        last = 0 if self._use is not None else int(self._trained.max(initial=0))
        return self.count(last) if self.are_many(last) else (0, 0)

    @cached_property
    def _trained(self) -> Column:
        return np.union1d(self._find((GRAD_OUTPUT, GRAD_INPUT, PARAMETER_GRAD), BACKWARD), self._used)

    @cached_property
    def _skipped(self) -> Column:
        unused: Column = np.setdiff1d(self._trained, self._used)
        return unused if self._has_scaler() else unused[unused < self._used.max(initial=-1)]

    @cached_property
    def _used(self) -> Column:
        """The steps in which an optimizer ran: the gradients of parameters are measured when it begins."""
        return self._find((PARAMETER_GRAD,), OPTIMIZER)

    def _has_scaler(self) -> bool:
        names = self._tables.data.table("ops")["name"].unique().to_pylist()
        return UNSCALES in map(bare_name, names)

    def _find(self, roles: Sequence[str], phase: str) -> Column:
        """Returns the steps with tensors of some roles, or with ops of a phase."""
        data = self._tables.data
        values, ops = data.table("values").select(["step", "site_id"]), data.table("ops")
        by_role = column_of(values, "step")[
            np.isin(column_of(values, "site_id"), self._tables.sites_of(*roles))
        ]
        by_phase = column_of(ops, "step")[phase_codes(ops["phase"]) == PHASES.index(phase)]
        found: Column = np.union1d(by_role, by_phase)
        return found
