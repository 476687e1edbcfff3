"""Chooses the newest training steps that are alike, and reads their rows and no others."""

from functools import cached_property

import numpy as np
import pyarrow as pa

from ...recording.phase import FORWARD, PHASES
from ...recording.protocols import RecordingData
from .columns import Column, column_of, phase_codes
from .one_step import IndexedTables
from .values import PlacedValues

#: The largest number of steps that are read to judge a run.
MOST_STEPS = 50

#: The steps among which those are chosen; at most so many of the newest.
_SEARCHED_STEPS = 4 * MOST_STEPS

#: The first steps allocate memory and fill caches, so they are left out if as many are left.
_WARM_UP = 2


class SampledSteps(IndexedTables):
    """A recording of which the newest comparable training steps are read, at most 50 of them.

    Comparable are steps that called the same modules from outside as most of the steps do. The first two training steps
    and steps in which something was compiled are left out, if others are left.
    """

    @cached_property
    def steps(self) -> pa.Table:
        """The rows of all steps that have ended, in their order."""
        return self.data.table("steps").sort_by("step")

    @cached_property
    def training(self) -> Column:
        """The numbers of all training steps that have ended."""
        kinds = np.array(self.steps["kind"].to_pylist(), object)
        return np.asarray(column_of(self.steps, "step")[kinds == "train"], np.int64)

    @cached_property
    def numbers(self) -> Column:
        """The numbers of the chosen training steps, ascending."""
        steps = self.training[_WARM_UP:] if len(self.training) > 2 * _WARM_UP else self.training
        steps = steps[-_SEARCHED_STEPS:]
        compiled = np.unique(column_of(self.data.table("compilations"), "step"))
        warm = np.setdiff1d(steps, compiled)
        steps = warm if len(warm) else steps
        return self._find_alike(steps)[-MOST_STEPS:]

    def _find_alike(self, steps: Column) -> Column:
        """Returns those steps that called the same modules from outside as most of them, or else as the last."""
        calls = self.find("calls", ["step", "module_id", "phase", "parent_call_id"], step=steps)
        is_one = (phase_codes(calls["phase"]) == PHASES.index(FORWARD)) & (
            column_of(calls, "parent_call_id") < 0
        )
        of_step: dict[int, list[int]] = {int(step): [] for step in steps}
        step, module = column_of(calls, "step")[is_one], column_of(calls, "module_id")[is_one]
        for number, called in zip(step.tolist(), module.tolist(), strict=True):
            of_step[number].append(called)
        keys = [tuple(sorted(called)) for called in of_step.values()]
        _, which, counts = np.unique([hash(key) for key in keys], return_inverse=True, return_counts=True)
        is_alike = counts[which] == counts.max(initial=0)
        last = which[np.flatnonzero(is_alike)[-1:]]  # of patterns that are as frequent, the newest
        return np.asarray(steps[np.isin(which, last)])

    def values(self, *roles: str, steps: Column | None = None) -> PlacedValues:
        """Returns the rows of `values` with these roles, of the chosen steps or of others."""
        table = self.find("values", step=self.numbers if steps is None else steps)
        values = PlacedValues(data=self.data, table=table)
        kept = np.flatnonzero(values.is_of(*roles))
        return PlacedValues(data=self.data, table=table.take(kept))

    def rows(self, name: str, steps: Column | None = None) -> pa.Table:
        """Returns the rows of a table with a column `step`, of the chosen steps or of others."""
        return self.find(name, step=self.numbers if steps is None else steps)


def sample_steps(data: RecordingData) -> SampledSteps:
    """Returns the recording with its comparable training steps."""
    return SampledSteps(data)
