"""Chooses the step that an analysis shows if the user names none, and finds the one that the user names."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa

from ...recording.phase import OPTIMIZER, PHASES
from ...recording.protocols import RecordingData
from ...recording.suggestions import count_of
from .columns import Bools, Column, column_of, phase_codes
from .quartiles import Quartiles


@dataclass(frozen=True, kw_only=True)
class StepSample:
    """The steps whose medians are shown."""

    steps: tuple[int, ...]  # ascending
    duration_ns: Quartiles
    overhead_ns: int  # the median of the time that modtrace spent measuring

    def describe(self) -> str:
        """Returns how many steps they are, the first and the last: `48 steps, 2 to 49`, or `48 steps of 2 to 99`."""
        first, last = self.steps[0], self.steps[-1]
        are_all = len(self.steps) == last - first + 1
        return f"{count_of(len(self.steps), 'step')}{',' if are_all else ' of'} {first} to {last}"


@dataclass(frozen=True, kw_only=True)
class ShownStep:
    """A step of a recording, with the recording's range of steps; of several steps, the last one."""

    step: int
    kind: str | None  # `train` or `eval`; None where the step's end was not recorded
    start_ns: int | None
    end_ns: int | None
    overhead_ns: int = 0  # how much of the time between start and end modtrace spent measuring
    first: int  # first of the recording's complete steps; first of all steps if none is complete
    last: int
    count: int
    partial: int = 0  # the number of further steps of which rows were recorded but no end
    sample: StepSample | None = None  # None where a single step is shown

    @property
    def complete(self) -> bool:
        """True if the step's end was recorded."""
        return self.end_ns is not None

    @property
    def duration_ns(self) -> int | None:
        """The duration without the time that modtrace spent measuring; None if the end was not recorded.

        Of several steps it is the median.
        """
        if self.sample is not None:
            return self.sample.duration_ns.median
        if self.start_ns is None or self.end_ns is None:
            return None
        return max(self.end_ns - self.start_ns - self.overhead_ns, 0)


@dataclass(frozen=True, kw_only=True, eq=False)
class ChosenSteps:
    """The steps of which rows are read, as columns; -1 stands for null."""

    shown: ShownStep | None  # the last of them; None if the recording is empty
    numbers: Column  # ascending; a single one unless medians are shown
    start_ns: Column
    end_ns: Column
    overhead_ns: Column

    @classmethod
    def single(cls, shown: ShownStep | None) -> "ChosenSteps":
        """Returns one step, or none."""
        steps = [] if shown is None else [shown]
        return cls(
            shown=shown,
            numbers=np.array([step.step for step in steps], np.int64),
            start_ns=_to_column(step.start_ns for step in steps),
            end_ns=_to_column(step.end_ns for step in steps),
            overhead_ns=np.array([step.overhead_ns for step in steps], np.int64),
        )

    @property
    def several(self) -> bool:
        """True if medians are shown."""
        return self.shown is not None and self.shown.sample is not None

    @property
    def ended(self) -> Bools:
        """Whether the times of each step are known."""
        return np.asarray((self.start_ns >= 0) & (self.end_ns >= 0))

    @property
    def duration_ns(self) -> Column:
        """The duration of each step without the time that modtrace spent measuring; -1 if its end was not recorded."""
        took = np.maximum(self.end_ns - self.start_ns - self.overhead_ns, 0)
        return np.where(self.ended, took, -1)


def _to_column(times: Iterable[int | None]) -> Column:
    return np.array([-1 if time is None else time for time in times], np.int64)


#: The names of steps, each with an index into the steps and the kind to which it applies; None stands for any kind.
STEP_NAMES: Mapping[str, tuple[int, str | None]] = {
    "first": (0, None),
    "last": (-1, None),
    "first-train": (0, "train"),
    "last-train": (-1, "train"),
    "first-eval": (0, "eval"),
    "last-eval": (-1, "eval"),
}


def find_step(data: RecordingData, asked: int | str | None) -> int | None:
    """Returns the number of a step that is given as a number, as an index from the end (-1) or by one of STEP_NAMES.

    Raises:
        ValueError: there is no such step. A number that is not negative is returned without a check.
    """
    if asked is None or (isinstance(asked, int) and asked >= 0):
        return asked
    steps = data.table("steps")
    kinds: dict[int, str] = dict(zip(steps["step"].to_pylist(), steps["kind"].to_pylist(), strict=True))
    known = sorted(kinds.keys() | set(np.unique(column_of(data.table("calls"), "step")).tolist()))
    at, kind = STEP_NAMES[asked] if isinstance(asked, str) else (asked, None)
    meant = [step for step in known if kind in (None, kinds.get(step))]
    if not -len(meant) <= at < len(meant):
        raise no_step(asked, known, "" if kind is None else f" ({', '.join(sorted(set(kinds.values())))})")
    return meant[at]


def find_step_kinds(data: RecordingData) -> dict[int, str | None]:
    """Returns the kind of each step by its number; None for a step whose end was not recorded."""
    steps = data.table("steps")
    kinds = dict(zip(steps["step"].to_pylist(), steps["kind"].to_pylist(), strict=True))
    tables = ("steps", "calls", "ops", "values")
    known = {step for name in tables for step in np.unique(column_of(data.table(name), "step")).tolist()}
    return {step: kinds.get(step) for step in known}


def count_training(data: RecordingData) -> dict[int, int]:
    """Returns for each training step how many there have been with it, as a training log counts them.

    It is empty if no step is one of evaluation, or if the recording lacks steps before its last one.
    """
    table = data.table("steps")
    kinds = dict(zip(table["step"].to_pylist(), table["kind"].to_pylist(), strict=True))
    if "eval" not in kinds.values() or sorted(kinds) != list(range(len(kinds))):
        return {}
    training = sorted(step for step, kind in kinds.items() if kind == "train")
    return {step: number for number, step in enumerate(training, 1)}


def choose_step(
    steps: pa.Table, calls: pa.Table, step: int | None, *, also: Iterable[int] = ()
) -> ShownStep | None:
    """Returns the requested step, or the one worth showing if `step` is None; None if there are no steps.

    Raises:
        ValueError: there is no such step.
    """
    rows = {row["step"]: row for row in steps.to_pylist()}
    of_calls = column_of(calls, "step")
    called = {*np.unique(of_calls).tolist(), *also}
    known = sorted(rows.keys() | called)
    ended = sorted(rows)
    if step is None:
        step = _most_telling(rows, called, _steps_with_optimizer(calls, of_calls))
    elif step not in known:
        raise no_step(step, known)
    if step is None:
        return None
    row = rows.get(step, {})
    return ShownStep(
        step=step,
        kind=row.get("kind"),
        start_ns=row.get("start_ns"),
        end_ns=row.get("end_ns"),
        overhead_ns=row.get("overhead_ns") or 0,
        first=(ended or known)[0],
        last=(ended or known)[-1],
        count=len(ended),
        partial=len(known) - len(ended),
    )


def _steps_with_optimizer(calls: pa.Table, of_calls: Column) -> set[int]:
    """Returns the steps in which an optimizer has stepped."""
    is_optimizer = phase_codes(calls["phase"]) == PHASES.index(OPTIMIZER)
    return set(np.unique(of_calls[is_optimizer]).tolist())


def _most_telling(rows: dict[int, dict[str, Any]], called: set[int], updated: set[int]) -> int | None:
    """Returns the last complete step, preferring training to evaluation and steps with calls to steps without.

    A training step without an optimizer call ranks after those with one, because an exception may have ended it.
    """
    complete = [step for step in rows if step in called]
    training = [step for step in complete if rows[step]["kind"] == "train"]
    updating = [step for step in training if step in updated]
    return max(updating or training or complete or called or rows, default=None)


def no_step(asked: int | str, known: Sequence[int], kinds: str = "") -> ValueError:
    """Returns the error for a step that does not exist, which lists the existing ones."""
    there = f"{name_steps(known)}{kinds}" if known else "none"
    return ValueError(f"no step {asked!r} in this recording; there are: {there}")


def name_steps(steps: Sequence[int]) -> str:
    """Returns sorted step numbers as ranges: `0..19, 25`."""
    runs: list[list[int]] = []
    for step in steps:
        if runs and step == runs[-1][1] + 1:
            runs[-1][1] = step
        else:
            runs.append([step, step])
    return ", ".join(str(first) if first == last else f"{first}..{last}" for first, last in runs)
