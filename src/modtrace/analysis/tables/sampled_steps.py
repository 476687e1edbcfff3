"""Chooses the newest steps that are alike, and reads their rows and no others."""

from collections import defaultdict
from functools import cached_property

import numpy as np
import pyarrow as pa

from ...recording.arrow.arrays import from_numpy
from ...recording.options.schedule import StepRange
from ...recording.phase import FORWARD, OPTIMIZER, PHASES
from ...recording.protocols import RecordingData
from ...recording.role import LOSS
from .chosen_step import name_steps
from .columns import Column, column_of, keep_rows, phase_codes
from .indexed_tables import IndexedTables
from .parameter_facts import Parameter, read_parameters
from .values import MEASURED_NUMBERS, PlacedValues

#: The largest number of steps that are read to judge a run.
MOST_STEPS = 50

#: The steps among which those are chosen; at most so many of the newest.
_SEARCHED_STEPS = 4 * MOST_STEPS

#: The kind of a step without recorded calls.
_NO_CALLS = 0

#: The first steps allocate memory and fill caches, so they are left out if as many are left.
_WARM_UP = 2

#: The phases of calls that tell whether steps are alike. How often a backward reaches a root may differ.
_OUTER = (PHASES.index(FORWARD), PHASES.index(OPTIMIZER))

#: How many rows of a table are read of several steps: 250,000 calls take about 50 MB.
_MOST_ROWS = 250_000


class SampledSteps(IndexedTables):
    """A recording of which the newest comparable training steps are read, at most 50 of them.

    Comparable are steps that called the same modules from outside, and optimizers, as most of the steps do. The first
    two training steps and steps in which something was compiled are left out, if others are left.
    """

    @cached_property
    def steps(self) -> pa.Table:
        """The rows of all steps that have ended, in their order."""
        return self.data.table("steps").sort_by("step")

    @cached_property
    def training(self) -> Column:
        """The numbers of all training steps that have ended."""
        return self._of_kind("train")

    def _of_kind(self, kind: str) -> Column:
        kinds = np.array(self.steps["kind"].to_pylist(), object)
        return np.asarray(column_of(self.steps, "step")[kinds == kind], np.int64)

    @cached_property
    def numbers(self) -> Column:
        """The numbers of the chosen training steps, ascending."""
        steps = self.training[_WARM_UP:] if len(self.training) > 2 * _WARM_UP else self.training
        steps = steps[-_SEARCHED_STEPS:]
        compiled = np.unique(column_of(self.data.table("compilations"), "step"))
        warm = np.setdiff1d(steps, compiled)
        return self._find_alike(warm if len(warm) else steps)

    @cached_property
    def newest(self) -> Column:
        """The numbers of the newest training steps with calls, ascending; they need not have called the same."""
        steps = self.training[-_SEARCHED_STEPS:]
        return self._know(steps, self.find_kinds(steps))[0][-MOST_STEPS:]

    def numbers_in(self, wanted: StepRange) -> Column:
        """Returns the comparable steps of a range: training steps, also the first ones, or else eval steps.

        Raises:
            ValueError: the range has no step that has ended.
        """
        for kind in ("train", "eval"):
            steps = self._of_kind(kind)
            steps = steps[[step in wanted for step in steps.tolist()]]
            if len(steps):
                return self._find_alike(steps[-_SEARCHED_STEPS:])
        there = name_steps(column_of(self.steps, "step").tolist()) or "none"
        raise ValueError(
            f"steps={str(wanted)!r} holds no step of this recording that has ended; there are: {there}"
        )

    def _find_alike(self, steps: Column) -> Column:
        """Returns the newest of those steps that called the same from outside as most of them, or else as the last."""
        known, kinds = self._know(steps, self.find_kinds(steps))
        _, which, counts = np.unique(kinds, return_inverse=True, return_counts=True)
        is_alike = counts[which] == counts.max(initial=0)
        last = kinds[np.flatnonzero(is_alike)[-1:]]  # of patterns that are as frequent, the newest
        return np.asarray(known[np.isin(kinds, last)][-MOST_STEPS:])

    def find_unlike(self, steps: Column) -> Column:
        """Returns the training steps between alike ones that called models or optimizers otherwise."""
        between = self.training[(self.training > steps[0]) & (self.training < steps[-1])][-_SEARCHED_STEPS:]
        compared = np.append(between, steps[-1])
        known, kinds = self._know(compared, self.find_kinds(compared))
        return np.asarray(known[kinds != kinds[-1:]])

    @staticmethod
    def _know(steps: Column, kinds: Column) -> tuple[Column, Column]:
        """Returns the steps with calls, and their kinds.

        A step without calls of modules is left out, as they were dropped; so is the one after it, which may lack some.
        """
        has_calls = kinds != _NO_CALLS
        if has_calls.any() and not has_calls[0]:
            has_calls[np.argmax(has_calls)] = np.count_nonzero(has_calls) == 1
        return steps[has_calls], kinds[has_calls]

    def find_kinds(self, steps: Column) -> Column:
        """Returns a number for each step, equal for steps that called the same from outside.

        It is _NO_CALLS for a step without calls of modules.
        """
        calls = self.find("calls", ["step", "module_id", "phase", "parent_call_id"], step=steps)
        is_one = np.isin(phase_codes(calls["phase"]), _OUTER) & (column_of(calls, "parent_call_id") < 0)
        step, module = column_of(calls, "step")[is_one], column_of(calls, "module_id")[is_one]
        of_step: dict[int, list[int]] = defaultdict(list)
        for number, called in zip(step.tolist(), module.tolist(), strict=True):
            of_step[number].append(called)
        has_modules = np.isin(steps, step[module >= 0])  # an optimizer has no module
        kinds = [
            hash(tuple(sorted(of_step[number]))) if known else _NO_CALLS
            for number, known in zip(steps.tolist(), has_modules.tolist(), strict=True)
        ]
        return np.array(kinds, np.int64)

    def limit(self, steps: Column, *tables: str) -> Column:
        """Returns the newest of the steps that have at most 250,000 rows in each table, and at least the last."""
        for name in tables:
            step = column_of(self.find(name, ["step"], step=steps), "step")
            rows = np.bincount(np.searchsorted(steps, step), minlength=len(steps))
            fits = np.cumsum(rows[::-1])[::-1] <= _MOST_ROWS
            steps = steps[fits] if fits.any() else steps[-1:]
        return steps

    @cached_property
    def parameters(self) -> list[Parameter]:
        """The parameters of all models that trained, in the order in which they were first seen."""
        return read_parameters(self.data)

    @cached_property
    def losses(self) -> PlacedValues:
        """The losses of all training steps that have ended."""
        table = self.data.table("values").select([*MEASURED_NUMBERS, "dtype"])
        is_one = np.isin(column_of(table, "site_id"), self.sites_of(LOSS))
        is_one &= np.isin(column_of(table, "step"), self.training)
        return PlacedValues(data=self.data, table=table.filter(from_numpy(is_one)))

    def values(self, *roles: str, steps: Column | None = None) -> PlacedValues:
        """Returns the rows of `values` with these roles, of the chosen steps or of others."""
        table = self.find("values", step=self.numbers if steps is None else steps)
        is_wanted = PlacedValues(data=self.data, table=table).is_of(*roles)
        return PlacedValues(data=self.data, table=keep_rows(table, is_wanted))

    def rows(self, name: str, steps: Column | None = None) -> pa.Table:
        """Returns the rows of a table with a column `step`, of the chosen steps or of others."""
        return self.find(name, step=self.numbers if steps is None else steps)


def sample_steps(data: RecordingData) -> SampledSteps:
    """Returns the recording with its comparable training steps."""
    return SampledSteps(data)
