"""Explains why a recording has no rows for a request: they were not recorded, or they are missing."""

from collections.abc import Sequence

import numpy as np

from ...errors import NothingRecordedError
from ...recording.meta import HELD, RunMeta
from ...recording.options.schedule import ALL_STEPS
from ...recording.phase import PHASES
from ...recording.protocols import RecordingData
from .chosen_step import name_steps
from .columns import column_of, phase_codes

#: The reason given when rows were requested, none is missing, and there are none all the same.
_NOTHING_RAN = {
    "ops": "no op ran on the thread that entered it, and it has no ops of other threads",
    "steps": "its calls are of no step",
    "values": "no tensor came up that it was to measure",
    "whole tensors": "no tensor came up that it was to keep",
}


def require_rows(data: RecordingData, table: str) -> None:
    """Refuses a recording without rows of a table, which could only give an empty answer.

    Raises:
        NothingRecordedError: there are no rows; the message says why.
    """
    if not data.table(table).num_rows:
        raise NothingRecordedError(explain_none(data, table))


def require_ops(data: RecordingData, step: int, phase: str | None = None) -> None:
    """Refuses a step, or a phase of it, without ops.

    Raises:
        NothingRecordedError: there are no ops; the message says where there are some.
    """
    require_rows(data, "ops")
    ops = data.table("ops").select(["step", "phase"])
    of_step = column_of(ops, "step") == step
    found, missing = phase_codes(ops["phase"])[of_step], say_missing(data.meta.marks)
    if phase is None and not len(found):
        steps = name_steps(np.unique(column_of(ops, "step")).tolist())
        raise NothingRecordedError(f"no ops are of step {step}; steps with ops: {steps}.{missing}")
    if phase is not None and PHASES.index(phase) not in found:
        there = ", ".join(phase for code, phase in enumerate(PHASES) if code in found) or "none"
        raise NothingRecordedError(
            f"no ops of step {step} ran in phase {phase!r}; they ran in: {there}.{missing}"
        )


def explain_none(data: RecordingData, what: str) -> str:
    """Returns the reason why there are no `calls`, `ops`, `steps`, `values` or `whole tensors`."""
    meta, has_calls = data.meta, bool(data.table("calls").num_rows)
    held = [note.reason for note in meta.notes if note.kind == HELD]
    # Where no module was called, an option would not have helped.
    if not _were_wanted(meta, what) and (has_calls or held or meta.marks or not meta.complete):
        return f"no {what} were recorded. Record with {_name_option(what)}."
    why = f": {held[-1]}" if held else ""
    if meta.marks:
        return f"no {what} are in this recording{why}.{say_missing(meta.marks)}"
    if held:
        return f"no {what} are in this recording{why}"
    if not meta.complete:
        return f"no {what} are in this recording yet: no step with any has ended."
    return f"no {what} are in this recording: {_NOTHING_RAN[what] if has_calls else _why_no_calls(data)}."


def explain_empty(data: RecordingData) -> str:
    """Returns why a recording has no calls, ops, values and logged numbers, and what to do; "" if it has some."""
    if any(data.table(name).num_rows for name in ("calls", "ops", "values", "scalars")):
        return ""
    meta = data.meta
    advice = " Record a program that calls a torch.nn.Module in its steps." if meta.complete else ""
    return f"Nothing was recorded: {explain_none(data, 'calls')}{advice}"


def _why_no_calls(data: RecordingData) -> str:
    """Returns why a recording without damage has no calls."""
    chosen = data.meta.options.get("steps", str(ALL_STEPS))
    if chosen != str(ALL_STEPS) and not data.table("steps").num_rows:
        return f"no step of {chosen} ran"
    return "no module was called in its steps"


def _name_option(what: str) -> str:
    """Returns the option of `record` that records the rows; calls need none."""
    if what == "ops":
        return "ops=True (modtrace record --ops)"
    if what == "values":
        return "values='stats' or modtrace.Capture(...) (modtrace record --values stats or --capture)"
    return "values=modtrace.Capture(tensors=True) (modtrace record --capture tensors)"


def say_missing(marks: Sequence[str]) -> str:
    """Returns a sentence, after a space, that quotes the marks of a recording; "" if there are none."""
    return f" The recording is not whole: {'; '.join(marks)}." if marks else ""


def _were_wanted(meta: RunMeta, what: str) -> bool:
    """Returns whether the options request the rows; for unknown options, whether the recording has marks or notes."""
    if what == "calls":
        return True
    option = meta.options.get("ops" if what == "ops" else "values", bool(meta.marks or meta.notes))
    if what == "whole tensors" and not isinstance(option, bool):
        return isinstance(option, list) and any(capture.get("tensors") for capture in option)
    return bool(option)
