"""Chooses the step that an analysis shows if the user names none, and finds the one that the user names."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa

from ...recording.phase import OPTIMIZER, PHASES
from ...recording.protocols import RecordingData
from .columns import Column, column_of, phase_codes


@dataclass(frozen=True, kw_only=True)
class ShownStep:
    """A step of a recording, with the recording's range of steps."""

    step: int
    kind: str | None  # `train` or `eval`; None where the step's end was not recorded
    start_ns: int | None
    end_ns: int | None
    overhead_ns: int = 0  # how much of the time between start and end modtrace spent measuring
    first: int  # first of the recording's complete steps; first of all steps if none is complete
    last: int
    count: int
    partial: int = 0  # the number of further steps of which rows were recorded but no end

    @property
    def complete(self) -> bool:
        """True if the step's end was recorded."""
        return self.end_ns is not None

    @property
    def duration_ns(self) -> int | None:
        """The duration without the time that modtrace spent measuring; None if the end was not recorded."""
        if self.start_ns is None or self.end_ns is None:
            return None
        return max(self.end_ns - self.start_ns - self.overhead_ns, 0)


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
