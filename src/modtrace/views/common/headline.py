"""Writes the text around a table of one step: its first lines, and how much it leaves out."""

import shlex
from collections.abc import Sequence

from ...analysis.tables.chosen_step import ShownStep
from ...recording.meta import HELD, Note, RunMeta
from ...recording.suggestions import count_of
from .columns import Text
from .numbers import format_time

#: A text for steps whose device times were to be recorded, but are missing.
NO_DEVICE_TIMES = "no device times: nothing here ran on a CUDA device"


def describe_head(
    command: Sequence[str], step: ShownStep | None, marks: Sequence[str], *, missing: str = ""
) -> list[Text]:
    """Returns the command line of the run, the number of the step, and the marks of the recording.

    Args:
        command: the command line.
        step: the step that is shown.
        marks: the marks of the recording.
        missing: a remark to append if there is a step.
    """
    lines = [Text(shlex.join(command), "bold")] if command else []
    return [
        *lines,
        Text(_describe_step(step, missing)),
        *(Text(f"! {mark}", "yellow") for mark in marks),
    ]


def name_rank(meta: RunMeta) -> str:
    """Returns what is put in front of the messages of a rank among several: `rank 3: `."""
    return f"rank {meta.rank}: " if meta.world_size > 1 else ""


def _describe_step(step: ShownStep | None, missing: str) -> str:
    if step is None:
        return "nothing was recorded"
    known = _describe_known(step)
    if step.duration_ns is None:
        return f"step {step.step}, whose end was not recorded; {known}"
    measuring = f", and {format_time(step.overhead_ns)} of measuring" if step.overhead_ns else ""
    nothing = f", {missing}" if missing else ""
    return f"step {step.step} ({step.kind}), {format_time(step.duration_ns)}{measuring}{nothing}; {known}"


def _describe_known(step: ShownStep) -> str:
    """Returns a sentence on the number of steps in the recording."""
    of = f", {step.first} to {step.last}" if step.count > 1 else ""
    whole = f"{count_of(step.count, 'step')} recorded{of}"
    if not step.partial:
        return whole
    if step.count:
        return f"{whole}, and parts of {step.partial} more"
    return f"parts of {count_of(step.partial, 'step')} recorded"


#: The largest number of notes that are shown; the last ones are.
_SHOWN_NOTES = 5


def describe_notes(notes: Sequence[Note]) -> list[Text]:
    """Returns lines on why steps of the recording were written or not, from its last notes."""
    hidden = len(notes) - _SHOWN_NOTES
    lines = [f"{hidden} more notes before these"] if hidden > 0 else []
    lines += [describe_note(note) for note in notes[-_SHOWN_NOTES:]]
    return [Text(line, "cyan") for line in lines]


def describe_note(note: Note) -> str:
    """Returns a sentence on why steps were written or not."""
    if note.kind == HELD:
        return note.reason
    step = "" if note.step is None else f"step {note.step}: "
    return f"written because: {step}{note.reason or note.kind}"
