"""`modtrace record`: runs a Python script as it is, and records its models."""

import contextlib
import os
import shlex
import sys
import threading
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import click

from ..errors import ModtraceError, ModtraceWarning
from ..recording.options.capture_text import parse_capture
from ..recording.options.step_range import ALL_STEPS, to_step_range
from ..recording.suggestions import count_of
from ..views.common.headline import describe_note
from .children import StartedProcesses
from .run_program import Program, exit_like, find_module, find_script, run_program

_REPORT_EVERY_S = 10.0

#: At the end: the last trigger, and what was held behind it.
_SHOWN_NOTES = 2

#: ... and of what is missing: one line is read.
_SHOWN_MARKS = 2

_VALUE_OPTIONS = ("--to", "--steps", "--values", "--capture", "--include", "--exclude", "--keep-last")


class _RecordCommand(click.Command):
    """Leaves everything from the script, or from `-m` and the module's name, to the program."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        at = 0
        while at < len(args) and args[at].startswith("-") and args[at] != "--":
            if args[at] == "-m":
                args = [*args[: at + 2], "--", *args[at + 2 :]]
                break
            at += 2 if args[at] in _VALUE_OPTIONS else 1
        else:
            if at < len(args) and args[at] != "--":
                args = [*args[:at], "--", *args[at:]]
        return super().parse_args(ctx, args)


@click.command(cls=_RecordCommand)
@click.option("--to", metavar="DIR", help="Where to write. Default: the program's name with .modtrace.")
@click.option("--steps", metavar="START:STOP[:EVERY]", help="Which steps to keep. Default: all.")
@click.option(
    "--values",
    type=click.Choice(["stats", "none"]),
    default="stats",
    show_default=True,
    help="What to measure of outputs, gradients and parameters.",
)
@click.option(
    "--capture",
    metavar="TEXT",
    multiple=True,
    help="Instead of --values: which tensors, when, and what is kept, as in docs/capture.md: "
    "'roles=output,update stats=2 hash steps=::10'. May be said again; 'stats' is what --values means.",
)
@click.option(
    "--include",
    metavar="PATTERN",
    multiple=True,
    help="Measure these alone: a glob over the path of a module or parameter (** crosses dots), or re:EXPRESSION.",
)
@click.option("--exclude", metavar="PATTERN", multiple=True, help="Do not measure these.")
@click.option("--ops", is_flag=True, help="Every operator too, with its tensors and what it costs.")
@click.option(
    "--keep-last",
    type=click.IntRange(min=1),
    metavar="N",
    help="Hold the last N steps, and write them only before a NaN or infinity, or when the program fails.",
)
@click.option("--backward-times", is_flag=True, help="Also when each call's backward begins and ends.")
@click.option("--overwrite", is_flag=True, help="Replace a recording that is there.")
@click.option("--quiet", "-q", is_flag=True, help="Neither progress nor the closing line on standard error.")
@click.option("-m", "module", metavar="MODULE", help="Run a module, as `python -m` does.")
@click.argument("program", nargs=-1, type=click.UNPROCESSED, metavar="SCRIPT [ARGS]...")
def record(
    to: str | None,
    steps: str | None,
    values: str,
    capture: tuple[str, ...],
    include: tuple[str, ...],
    exclude: tuple[str, ...],
    ops: bool,
    keep_last: int | None,
    backward_times: bool,
    overwrite: bool,
    quiet: bool,
    module: str | None,
    program: tuple[str, ...],
) -> Callable[[], int]:
    """Runs SCRIPT and records every module call in it.

    The script runs as `python SCRIPT ARGS` would run it, and its exit code is passed on.
    """
    found = _find_program(module, program)
    place = to or _free_place(found.stem)
    options = {
        "steps": steps,
        "values": _read_captures(capture) or (None if values == "none" else values),
        "include": include or None,
        "exclude": exclude or None,
        "ops": ops,
        "keep_last": keep_last,
        "backward_times": backward_times,
        "overwrite": overwrite,
    }
    recording = _make_recording(place, options)
    # Run by `main` once click is out of the way: click turns a KeyboardInterrupt into an exception of its own.
    return lambda: _run(found, recording, quiet)


def _read_captures(texts: Sequence[str]) -> list[Any]:
    try:
        return [parse_capture(text) for text in texts]
    except (TypeError, ValueError) as error:
        raise click.UsageError(f"--{error}" if str(error).startswith("capture ") else str(error)) from error


def _find_program(module: str | None, arguments: Sequence[str]) -> Program:
    if module is not None:
        return find_module(module, arguments)
    if not arguments:
        raise click.UsageError("give a script to run, or -m and a module.")
    return find_script(arguments[0], arguments[1:])


def _free_place(stem: str) -> str:
    place, number = f"{stem}.modtrace", 1
    while os.path.exists(place):
        number += 1
        place = f"{stem}-{number}.modtrace"
    return place


def _make_recording(place: str, options: dict[str, Any]) -> Any:
    from ..live import record as record_to

    try:
        return record_to(to=place, **options)
    except ValueError as error:  # its text names the option
        raise click.UsageError(str(error)) from error


def _run(program: Program, recording: Any, quiet: bool) -> int:
    reporter = _Reporter(recording, quiet)
    try:
        with StartedProcesses() as started:
            code = run_program(program, _PlainWarnings(recording))
    except ModtraceError as error:
        reporter.end(())
        text = str(error).replace("overwrite=True", "--overwrite")  # in the words of the command line
        click.echo(f"modtrace: error: {text}", err=True)
        return 2
    reporter.end(_describe_end(recording, started.count))
    return exit_like(code)


class _PlainWarnings:
    """A recording whose last warnings come as lines of the command's, without a place in its source."""

    def __init__(self, recording: Any) -> None:
        self._recording = recording

    def __enter__(self) -> None:
        self._recording.__enter__()

    def __exit__(self, *raised: Any) -> None:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always", ModtraceWarning)
            self._recording.__exit__(*raised)
        for each in caught:
            if issubclass(each.category, ModtraceWarning):
                click.echo(f"modtrace: warning: {each.message}", err=True)
            else:
                warnings.warn_explicit(each.message, each.category, each.filename, each.lineno)


class _Reporter:
    """Says on standard error how far the recording is, every ten seconds and at the end."""

    def __init__(self, recording: Any, quiet: bool) -> None:
        self._recording = recording
        self._quiet = quiet
        self._pid = os.getpid()
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._report, name="modtrace-progress", daemon=True)
        if not quiet:
            with contextlib.suppress(RuntimeError):  # the system has no more threads
                self._thread.start()

    def end(self, lines: Iterable[str]) -> None:
        """Says no more of the progress, and these lines, of which the last is the last that is said at all."""
        if self._quiet or os.getpid() != self._pid:
            return
        self._ended.set()
        if self._thread.ident is not None:
            self._thread.join()  # a daemon thread that wakes while the interpreter goes down may abort it
        for line in lines:
            self._say(line)

    def _report(self) -> None:
        while not self._ended.wait(_REPORT_EVERY_S):
            progress = self._recording.progress
            held = f" ({progress.held:,} held)" if progress.held else ""
            self._say(f"{count_of(progress.steps, 'step')}{held}, {_describe_size(progress)} so far")

    @staticmethod
    def _say(text: str) -> None:
        try:
            print(f"modtrace: {text}", file=sys.stderr, flush=True)
        except (OSError, ValueError):  # standard error is closed
            return


def _describe_end(recording: Any, started: int) -> Iterator[str]:
    """Yields the last triggers, and the closing line: what is in the recording, what is not, and how to look at it."""
    try:
        meta, kept, calls = (
            recording.meta,
            recording.table("steps").num_rows,
            recording.table("calls").num_rows,
        )
    except ModtraceError as error:
        seen = count_of(recording.progress.steps, "step")
        yield f"{seen} ran, and what was recorded of them cannot be read: {error}"
        return
    for note in meta.notes[-_SHOWN_NOTES:]:
        yield describe_note(note)
    missing = list(meta.marks[:_SHOWN_MARKS])
    if not (calls or missing or meta.notes):
        missing.append(_say_why_nothing(recording.progress.steps, meta.options.get("steps")))
    if len(meta.marks) > _SHOWN_MARKS:
        missing.append(count_of(len(meta.marks) - _SHOWN_MARKS, "more mark"))
    if started:
        missing.append(f"not recorded: {count_of(started, 'Python process', plural='es')} that it started")
    said = "; ".join([_describe_kept(recording.progress, kept, "keep_last" in meta.options), *missing])
    yield (
        f"{said}. Look at it with: modtrace show {shlex.quote(str(recording.path))}" if calls else f"{said}."
    )


def _say_why_nothing(ran: int, chosen: str | None) -> str:
    """Returns why there is no call in a recording that is whole."""
    if ran and to_step_range(chosen) != ALL_STEPS:
        return f"no step of {chosen} ran"
    return "no module was called in this process"


def _describe_kept(progress: Any, kept: int, keeps_last: bool) -> str:
    """Returns how many steps are in the recording, and of how many where that is another number."""
    if not progress.steps and not progress.rows:
        return "recorded nothing"
    steps = count_of(progress.steps, "step")
    if keeps_last:
        steps = f"wrote {kept:,} of {steps}"
    else:
        steps = f"recorded {steps}" if kept == progress.steps else f"recorded {kept:,} of {steps}"
    return f"{steps}, {_describe_size(progress)}"


def _describe_size(progress: Any) -> str:
    return f"{count_of(progress.rows, 'row')}, {progress.size_bytes / 1e6:.1f} MB"
