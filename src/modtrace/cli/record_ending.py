"""Describes what `modtrace record` has recorded, in the lines that it closes with."""

import os
import shlex
from collections import Counter
from collections.abc import Collection, Iterator, Mapping
from typing import Any

from ..analysis.findings.out_of_memory import OUT_OF_MEMORY
from ..recording.options.capture import INSIDE
from ..recording.options.schedule import ALL_STEPS, to_step_range
from ..recording.out_of_memory import is_out_of_memory
from ..recording.statistics.moments import holds_nonfinite
from ..recording.suggestions import count_of
from ..views.common.headline import describe_note

#: The number of notes printed at the end: of the last trigger, and of steps that were held after it.
_SHOWN_NOTES = 2


#: The number of marks printed at the end; more would not be read.
_SHOWN_MARKS = 2


#: The kinds of steps, as the closing line names them.
_KINDS = {"train": "training", "eval": "evaluation"}


def describe_end(
    recording: Any, started: int, told: Collection[str], *, has_begun: bool, has_ended: bool
) -> Iterator[str]:
    """Yields the last triggers, and the closing lines: what is in the recording, what is not, and how to show it.

    Args:
        recording: the recording, after it has ended.
        started: how many Python processes the program has started.
        told: warnings that were printed while it ran.
        has_begun: whether the recording had begun.
        has_ended: whether the program has ended without an error.
    """
    if not has_begun:
        yield "recorded nothing: the program could not be started."
        return
    try:
        meta, kinds = recording.meta, Counter(recording.table("steps")["kind"].to_pylist())
        table = recording.table("calls")
        calls, hidden = table.num_rows, _describe_hidden(recording, meta.options)
        is_bad = bool(calls) and holds_nonfinite(recording.table("values"), recording.table("sites"))
    except Exception as error:  # a file of the recording may be anything by now
        seen = count_of(recording.progress.steps, "step")
        yield f"{seen} ran, and what was recorded of them cannot be read: {error}"
        return
    for note in meta.notes[-_SHOWN_NOTES:]:
        yield describe_note(note)
    marks = [mark for mark in meta.marks if mark not in told]
    missing = list(marks[:_SHOWN_MARKS])
    if not (calls or meta.marks or meta.notes):
        missing.append(_say_why_nothing(recording.progress.steps, meta.options.get("steps")))
    if meta.options.get("device_times") and calls and table["device_end_ns"].null_count == calls:
        missing.append("no device times: nothing ran on a CUDA device")
    if len(marks) > _SHOWN_MARKS:
        missing.append(count_of(len(marks) - _SHOWN_MARKS, "more mark"))
    if started:
        missing.append(f"not recorded: {count_of(started, 'Python process', plural='es')} that it started")
    said = "; ".join([_describe_kept(recording.progress, kinds, "keep_last" in meta.options), *missing])
    place = shlex.quote(str(recording.path))
    if calls and meta.rank:
        yield f"{said}."
    elif calls:
        yield f"{said}. Look at it with: modtrace {'ranks' if meta.world_size > 1 else 'show'} {place}"
        if is_bad:
            yield f"it holds NaN or infinite values. Do they matter? modtrace nonfinite {place}"
    elif recording.path and not recording.progress.rows and os.path.exists(recording.path):
        yield f"{said}. {place} is empty and can be deleted."
    else:
        yield f"{said}."
    if calls and (any(map(is_out_of_memory, meta.marks)) or recording.table("alive").num_rows):
        yield from _describe_out_of_memory(recording)
    if hidden and (has_ended or is_bad):
        yield hidden


def _describe_out_of_memory(recording: Any) -> Iterator[str]:
    """Yields what took the memory when there was not enough; if the program went on, in one line."""
    for finding in recording.findings(only=[OUT_OF_MEMORY.name]).findings:
        yield finding.text
        if finding.severity == "error":
            yield from (f"  {line}" for line in (*finding.evidence, f"try: {finding.remedy}"))


def _describe_hidden(recording: Any, options: Mapping[str, Any]) -> str:
    """Returns a hint on how to see modules that compiled code hides; "" if there is nothing to advise."""
    if recording.table("compilations").num_rows and not recording.table("modules").num_rows:
        return "no module was called outside of compiled functions: to see those inside, compile the model instead"
    if options.get("compiled") == INSIDE or options.get("ops") or not options.get("values"):
        return ""
    is_hiding = any(recording.table("calls")["compiled"].unique().to_pylist())
    return "torch.compile hides modules from it: --compiled inside measures them too" if is_hiding else ""


def _say_why_nothing(ran: int, chosen: str | None) -> str:
    """Returns why a complete recording has no calls."""
    if ran and to_step_range(chosen) != ALL_STEPS:
        return f"no step of {chosen} ran"
    return "no module was called in this process"


def _describe_kept(progress: Any, kinds: Counter[str], keeps_last: bool) -> str:
    """Returns how many steps of which kind are in the recording, and the number of all steps if it differs."""
    if not progress.steps and not progress.rows:
        return "recorded nothing"
    steps, kept = count_of(progress.steps, "step"), kinds.total()
    if keeps_last:
        steps = f"wrote {kept:,} of {steps}"
    elif kept != progress.steps:
        steps = f"recorded {kept:,} of {steps}"
    elif len(kinds) > 1:
        steps = "recorded " + " and ".join(
            count_of(kinds[kind], f"{name} step") for kind, name in _KINDS.items()
        )
    else:
        steps = f"recorded {steps}"
    return f"{steps}, {describe_size(progress)}"


def describe_size(progress: Any) -> str:
    return f"{count_of(progress.rows, 'row')}, {progress.size_bytes / 1e6:.1f} MB"
