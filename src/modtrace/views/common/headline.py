"""Writes the text around a table of one step, or of several: its first lines, and how much it leaves out."""

import shlex
from collections.abc import Iterator, Sequence

from ...analysis.tables.chosen_step import ShownStep
from ...analysis.tables.quartiles import Outlier
from ...recording.meta import HELD, Note, RunMeta
from ...recording.suggestions import count_of, first_few
from .columns import Legend, Text
from .numbers import format_time

#: A text for steps whose device times were to be recorded, but are missing.
NO_DEVICE_TIMES = "no device times: nothing here ran on a CUDA device"

#: The explanation of the columns `spread`.
QUARTILES_LEGEND: Legend = (
    (
        (
            ("spread",),
            "spread: between the first and the third quartile of the steps, as a part of the median",
        ),
    ),
    ((("spread",), "each number is a median over the steps, so that parts need not add up"),),
)


def describe_head(
    command: Sequence[str],
    step: ShownStep | None,
    marks: Sequence[str],
    *,
    missing: str = "",
    cycle: str | None = None,
    outliers: Sequence[Outlier] = (),
    took: str = "took {} the median",
) -> list[Text]:
    """Returns the command line of the run, the numbers of the steps, outliers, and the marks of the recording.

    Args:
        command: the command line.
        step: the step that is shown, or the last of several.
        marks: the marks of the recording.
        missing: a remark to append if there is a step.
        cycle: where the time from one step's start to the next goes.
        outliers: the steps that differ most from the median, the largest first.
        took: what they differ in, as a clause in which {} stands for `3.0 x`.
    """
    lines = [Text(shlex.join(command), "bold")] if command else []
    return [
        *lines,
        Text(_describe_step(step, missing)),
        *([] if cycle is None else [Text(cycle)]),
        *(Text(line, "yellow") for line in _describe_outliers(outliers, took)),
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
    which, half, overhead_ns = f"step {step.step} ({step.kind})", "", step.overhead_ns
    if step.sample is not None:
        which = f"median of {step.sample.describe()} ({step.kind})"
        took, overhead_ns = step.sample.duration_ns, step.sample.overhead_ns
        low, high = format_time(took.low), format_time(took.high)
        half = f" (half of them {low} to {high})" if low != high else ""
    measuring = f", and {format_time(overhead_ns)} of measuring" if overhead_ns else ""
    nothing = f", {missing}" if missing else ""
    return f"{which}, {format_time(step.duration_ns)}{half}{measuring}{nothing}; {known}"


#: The largest number of outliers that are described.
_SHOWN_OUTLIERS = 3


def _describe_outliers(outliers: Sequence[Outlier], took: str) -> Iterator[str]:
    """Yields a line for each of the largest outliers: `! step 17 took 3.0 x the median, largest excess in blocks.3`."""
    for outlier in outliers[:_SHOWN_OUTLIERS]:
        phase = f", {outlier.phase}" if outlier.phase else ""
        where = f"largest excess in {(outlier.name)}{phase}"
        yield f"! step {outlier.step} {took.format(f'{outlier.times:.1f} x')}, {where}"
    if len(outliers) > _SHOWN_OUTLIERS:
        steps = first_few([outlier.step for outlier in outliers[_SHOWN_OUTLIERS:]])
        yield f"! so did {count_of(len(outliers) - _SHOWN_OUTLIERS, 'more step')}, at least twice: {steps}"


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
