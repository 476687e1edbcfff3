"""Defines the function with which users record, and checks its arguments."""

import os
from collections.abc import Sequence

from ..optional import require
from ..recording.options.capture import COMPILED, INSIDE, STATS, Capture, Patterns, to_captures
from ..recording.options.op_options import Ops, to_ops
from ..recording.options.schedule import to_step_range
from ..recording.options.tensor_options import TensorOptions
from ..recording.triggers.trigger_kinds import Trigger, check_keep_last, paths_of, to_triggers
from .live import LiveRecording, RecordOptions

#: The default limit in bytes of a recording's rows in memory.
MAX_BYTES = 256 * 2**20


def record(
    model: object = None,
    to: str | os.PathLike[str] | None = None,
    *,
    values: "str | Capture | Sequence[str | Capture] | None" = STATS,
    include: Patterns = None,
    exclude: Patterns = None,
    ops: "bool | Ops" = False,
    steps: "str | range | slice | None" = None,
    backward_times: bool = False,
    device_times: bool = False,
    overwrite: bool = False,
    strict: bool = False,
    max_bytes: int = MAX_BYTES,
    keep_last: int | None = None,
    triggers: "Trigger | Sequence[Trigger] | None" = None,
    on_nonfinite: str | None = None,
    tensors: TensorOptions | None = None,
    compiled: str = "boundary",
) -> LiveRecording:
    """Records every module call inside its `with` block.

        with modtrace.record(model, to="run.modtrace") as rec:
            for batch in data:
                train_step(batch)
        print(rec)

    Args:
        model: the root module, a dict of named roots, or a list of roots; None finds the roots. Other modules that
            run are recorded too.
        to: a folder to which the recording is written while it is made; None keeps it in memory.
        values: `"stats"` measures the output of every module, its gradients, and at each optimizer step the
            parameters and their gradients: count, minimum, maximum, sums, NaN and infinite elements.
            `Capture(...)`, or a list of several, selects the tensors, the steps, and what is kept. None measures
            nothing, and only calls are recorded.
        include: with `"stats"`, selects modules and parameters by path: a glob over the whole path, where `*` stays
            within one part and `**` crosses dots; a compiled regular expression, which is searched; a list of
            those; None for all. A parameter is selected by its own path or by its module's.
        exclude: leaves out modules and parameters that `include` selects.
        ops: records every operator too: forward, backward, recompute and optimizer, with the tensors it reads and
            returns and its costs; with `values="stats"` its outputs are measured as well. `Ops(...)` selects what
            else is kept. Ops on other threads of the user's are not seen.
        steps: selects steps: `"START:STOP[:EVERY]"`, a range or a slice; None for all.
        backward_times: also records when each call's backward begins and ends (about 10 us per call).
        device_times: also records when a CUDA device works on each call, and on each op with `ops` (some 10 us each).
            Other times are those at which the host issues work.
        overwrite: replaces a recording at `to`.
        strict: raises internal errors of modtrace instead of storing a mark in the recording.
        max_bytes: without `to`, and with `keep_last`, the limit of the rows in bytes; the oldest are dropped first.
        keep_last: the number of last steps to hold in memory. They are written only when a trigger fires, an
            exception leaves the block, or at `rec.dump()`. None writes every step.
        triggers: `NonFinite(...)`, `Above(...)`, `OutOfBand(...)`, `OnSignal(...)`, or a list of those. None means
            `NonFinite()` with `keep_last`. Without `keep_last` each only leaves a note: see `rec.triggers`.
        on_nonfinite: `"report"` prints what made the first NaN or infinite values as soon as their step has ended;
            `"stop"` raises `NonFiniteError` before the optimizer uses them, else when the step has ended; `"dump"`
            writes the steps that `keep_last` holds. It adds `NonFinite(then=...)` to `triggers`.
        tensors: how whole tensors are kept: how many bytes of them may wait or be held, and what happens if there
            are more. None means `TensorOptions()`.
        compiled: `"inside"` also measures modules inside of `torch.compile`, which compiles once more for that (in
            bfloat16 and float16 results are rounded otherwise); `"boundary"` what a region as a whole returns.

    Raises:
        TypeError: `model` is or contains something that is not a module.
        ValueError: `steps` contains no step, `max_bytes` or `keep_last` is not positive, `values` is something else,
            `on_nonfinite` or `compiled` can do nothing, or a pattern cannot be read or matches nothing in `model`.
        NonFiniteError: in the block and at its end, with `on_nonfinite="stop"`.
        MissingLibraryError: torch is not installed; on entering, if `ops` is given and what sees ops is not compiled.
        MisuseError: on entering, if a recording to the same path is running in this process.
        RecordingExistsError: on entering, if `to` exists already.
    """
    require("torch", "modtrace.record() (modtrace record)")
    from ..collect.names.given_models import roots_of

    roots_of(model)
    wanted_ops = to_ops(ops)
    captures = to_captures(values, include, exclude, ops=wanted_ops is not None)
    check_keep_last(keep_last)
    watched = to_triggers(triggers, keep_last=keep_last, captures=captures, on_nonfinite=on_nonfinite)
    check_choices(captures, watched, model)
    options = RecordOptions(
        steps=to_step_range(steps),
        backward_times=backward_times,
        device_times=device_times,
        values=captures,
        ops=wanted_ops,
        overwrite=overwrite,
        strict=strict,
        max_bytes=max_bytes,
        keep_last=keep_last,
        triggers=watched,
        tensors=checked_tensors(tensors),
        compiled=checked_compiled(compiled, captures),
    )
    return LiveRecording(model, to, options)


def check_choices(captures: Sequence[Capture], watched: Sequence[Trigger], model: object) -> None:
    """Raises ValueError if a pattern matches nothing in the model, or if a capture waits for a missing trigger."""
    from ..collect.names.given_models import check_patterns, check_types

    for paths in (*(capture.paths for capture in captures), *paths_of(watched)):
        check_patterns(paths, model)
    for capture in captures:
        check_types(capture.types, model)
        if capture.on_trigger and not watched:
            raise ValueError(
                f"Capture(on_trigger={capture.on_trigger}) (--capture on_trigger={capture.on_trigger}) waits for a "
                "trigger: give record(triggers=...) or keep_last= (--keep-last)"
            )


def checked_tensors(tensors: TensorOptions | None) -> TensorOptions:
    """Returns the options of whole tensors, or the default ones; raises TypeError for something else."""
    if tensors is not None and not isinstance(tensors, TensorOptions):
        raise TypeError(f"tensors={tensors!r}: give modtrace.TensorOptions(...)")
    return tensors or TensorOptions()


def checked_compiled(compiled: str, captures: Sequence[Capture]) -> str:
    """Returns what to measure of compiled code; raises ValueError for another word, or if no values are measured."""
    if compiled not in COMPILED:
        raise ValueError(f"compiled={compiled!r}: give {' or '.join(COMPILED)}")
    if compiled == INSIDE and not captures:
        raise ValueError(f"compiled={compiled!r} measures values, and no values are wanted")
    return compiled
