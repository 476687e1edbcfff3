"""`modtrace record`: runs a Python script as it is, and records its models."""

import contextlib
import os
import warnings
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import click

from ..errors import ModtraceError, ModtraceWarning, RecordingExistsError, describe_error
from ..optional import require
from ..recording.options.capture import BOUNDARY, COMPILED
from ..recording.options.capture_text import parse_capture
from ..recording.options.op_options import Ops
from ..recording.suggestions import count_of
from ..store.folder import delete_if_empty, may_join
from .children import StartedProcesses
from .endings import Exited, end_like
from .launch import check_count, start_ranks
from .open_run import usage_errors
from .progress import ProgressReporter
from .record_ending import describe_end, describe_size
from .run_program import Program, find_module, find_script, run_program

#: The key in click's context for the arguments without `--nproc`.
_FOR_RANKS = "modtrace.for-ranks"


class _RecordCommand(click.Command):
    """A command that leaves everything from the script, or from `-m` and the module's name, to the program."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        options = (
            option for option in self.params if isinstance(option, click.Option) and not option.is_flag
        )
        take_values = {name for option in options for name in option.opts}
        given, at, count_at = [*args], 0, slice(0)  # the place of `--nproc` and its value
        while at < len(args) and args[at].startswith("-") and args[at] != "--":
            if args[at] == "-m":
                args = [*args[: at + 2], "--", *args[at + 2 :]]
                break
            width = 2 if args[at] in take_values else 1
            count_at = slice(at, at + width) if args[at].split("=")[0] == "--nproc" else count_at
            at += width
        else:
            if at < len(args) and args[at] != "--":
                args = [*args[:at], "--", *args[at:]]
        ctx.meta[_FOR_RANKS] = [*given[: count_at.start or 0], *given[count_at.stop :]]
        return super().parse_args(ctx, args)


@click.command(cls=_RecordCommand)
@click.option(
    "-o",
    "--to",
    metavar="DIR",
    help="Where to write. Default: train.modtrace for train.py; if a recording is there, train-2.modtrace, and so on.",
)
@click.option("--steps", metavar="START:STOP[:EVERY]", help="Which steps to keep. Default: all.")
@click.option(
    "--values",
    type=click.Choice(["stats", "none"]),
    default="stats",
    show_default=True,
    help="What to measure of outputs, gradients, losses and parameters.",
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
@click.option("--source", is_flag=True, help="With --ops: the line of your program that ran each op.")
@click.option(
    "--keep-last",
    type=click.IntRange(min=1),
    metavar="N",
    help="Hold the last N steps, and write them only before a NaN or infinity, or when the program fails.",
)
@click.option(
    "--on-nonfinite",
    type=click.Choice(["report", "dump", "stop"]),
    help="At a NaN or infinity: print what made it; write what --keep-last holds; or end the program with an error "
    "before the optimizer uses it.",
)
@click.option(
    "--compiled",
    type=click.Choice(COMPILED),
    default=BOUNDARY,
    show_default=True,
    help="Of torch.compile's code: measure what it returns as a whole, or modules inside too.",
)
@click.option("--backward-times", is_flag=True, help="Also when each call's backward begins and ends.")
@click.option(
    "--device-times",
    is_flag=True,
    help="Also when a CUDA device works on each call, and on each op with --ops: other times are those at which the "
    "host issues work.",
)
@click.option(
    "--overwrite",
    is_flag=True,
    help="Replace a recording that is there: that of --to, or train.modtrace for train.py.",
)
@click.option(
    "--nproc",
    callback=check_count,
    metavar="N",
    help="Start the program in N ranks, as `torchrun --standalone --nproc-per-node N` does: a number, or gpu for one a "
    "GPU. All of them write one recording.",
)
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
    source: bool,
    keep_last: int | None,
    on_nonfinite: str | None,
    compiled: str,
    backward_times: bool,
    device_times: bool,
    overwrite: bool,
    nproc: str | None,
    quiet: bool,
    module: str | None,
    program: tuple[str, ...],
) -> Callable[[], int]:
    """Runs SCRIPT and records every module call in it.

    The script runs as `python SCRIPT ARGS` would run it, and its exit code is passed on.
    """
    found = _find_program(module, program)
    free_place = None if to or overwrite else partial(_free_place, found.stem)
    place = to or (f"{found.stem}.modtrace" if free_place is None else free_place())
    with usage_errors():
        captures = [parse_capture(text) for text in capture]
    if source and not ops:
        raise click.UsageError("--source is about the ops that --ops records: give both.")
    options = {
        "steps": steps,
        "values": captures or (None if values == "none" else values),
        "include": include or None,
        "exclude": exclude or None,
        "ops": Ops(source=True) if source else ops,
        "keep_last": keep_last,
        "on_nonfinite": on_nonfinite,
        "compiled": compiled,
        "backward_times": backward_times,
        "device_times": device_times,
        "overwrite": overwrite,
    }
    if nproc is not None:
        arguments = ["--to", place, *click.get_current_context().meta[_FOR_RANKS]]
        return lambda: start_ranks(nproc, arguments)
    recording = _make_recording(place, options)
    if recording is None:
        return lambda: end_like(run_program(found, contextlib.nullcontext(), lambda _: None))
    if keep_last is not None and options["values"] is None and not quiet:
        held = "the last step is" if keep_last == 1 else f"the last {keep_last} steps are"
        unseen = f"no NaN is seen: {held} written only when the program fails."
        click.echo(f"modtrace: --values none measures nothing, so {unseen}", err=True)
    # Run by `main` outside of click, which turns a KeyboardInterrupt into an exception of its own.
    return lambda: _run(found, recording, quiet, free_place)


def _find_program(module: str | None, arguments: Sequence[str]) -> Program:
    if module is not None:
        return find_module(module, arguments)
    if not arguments:
        raise click.UsageError("give a script to run, or -m and a module.")
    return find_script(arguments[0], arguments[1:])


def _free_place(stem: str) -> str:
    """Returns the first name that is free, or under which other ranks of this run have begun to write.

    The name of a run that has recorded nothing, as its program failed before any model was called, is free again.
    """
    place, number = f"{stem}.modtrace", 1
    while os.path.exists(place) and not delete_if_empty(Path(place)) and not _may_join(place):
        number += 1
        place = f"{stem}-{number}.modtrace"
    return place


def _may_join(place: str) -> bool:
    require("torch", "modtrace record")
    from ..collect.recorder.environment import describe_run

    return may_join(Path(place), describe_run({}))


def _make_recording(place: str, options: dict[str, Any]) -> Any:
    """Returns the recording; None, with a warning, if modtrace itself fails."""
    try:
        from ..api.record import record as record_to

        with usage_errors(), _warnings_in_lines():
            return record_to(to=place, **options)
    except (ModtraceError, click.ClickException):
        raise
    except Exception as error:
        what = f"modtrace met an internal error when it began to record ({describe_error(error)})"
        click.echo(f"modtrace: warning: {what}. Please report it. The program runs unrecorded.", err=True)
        return None


def _run(program: Program, recording: Any, quiet: bool, free_place: Callable[[], str] | None) -> int:
    progress = ProgressReporter(recording, _describe_progress, quiet=quiet)
    recorded = _Recorded(recording, progress.print, free_place)
    try:
        with StartedProcesses() as started:

            def end(*, has_ended: bool) -> Iterator[str]:
                return describe_end(
                    recording, started.count, recorded.told, has_begun=recorded.has_begun, has_ended=has_ended
                )

            def close(error: BaseException) -> None:
                recorded.close_beside(error)
                progress.end(end(has_ended=False))

            ending = run_program(program, recorded, close)
    except ModtraceError as error:
        progress.end(())
        click.echo(f"modtrace: error: {error}", err=True)
        return 2
    was_refused = ending == Exited(2) and not recording.progress.rows
    progress.end(
        [*end(has_ended=ending == Exited(0)), *(_find_misplaced(program.argv) if was_refused else ())]
    )
    end_like(ending)


def _find_misplaced(argv: Sequence[str]) -> Iterator[str]:
    """Yields a line on an option that the program was given, if it has the name of one of ours."""
    ours = {option for param in record.params for option in param.opts if option.startswith("--")}
    for given in (given for given in argv[1:] if given.partition("=")[0] in ours):
        yield f"the program was given {given}; if it was meant for modtrace record, put it in front of the program."
        return


class _Recorded:
    """The recording around the program. Failures of modtrace do not stop the program, and are printed as lines.

    Messages of modtrace name Python arguments meanwhile, for the program's own calls.
    """

    def __init__(
        self, recording: Any, say: Callable[[str], None], free_place: Callable[[], str] | None
    ) -> None:
        """Makes the block.

        Args:
            recording: the recording.
            say: prints a line.
            free_place: returns a path that is free, if the user has named none.
        """
        self._recording = recording
        self._say = say
        self._free_place = free_place
        self._around = contextlib.ExitStack()  # the callbacks that restore everything at the end
        self.has_begun = False
        self.told: list[str] = []  # warnings to print at the end

    def __enter__(self) -> None:
        with contextlib.ExitStack() as around:
            around.enter_context(_warnings_in_lines())
            self._begin()
            self._around = around.pop_all()
        self.has_begun = True

    def _begin(self) -> None:
        """Enters the recording, at another free path if another program has just begun to write to this one."""
        while True:
            try:
                self._recording.__enter__()
                return
            except RecordingExistsError:
                free = self._free_place and Path(self._free_place())
                if free in (None, self._recording.path):
                    raise
                self._recording.path = free

    def close_beside(self, error: BaseException) -> None:
        """Closes the recording while the program is blocked. Failures are only marked, as the process is ending."""
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            self._recording.__exit__(type(error), error, error.__traceback__)

    def __exit__(self, *raised: Any) -> None:
        self._around.close()
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always", ModtraceWarning)
            self._recording.__exit__(*raised)
        for warning in caught:
            if issubclass(warning.category, ModtraceWarning):
                self._say(f"warning: {warning.message}")
                self.told.append(str(warning.message))
            else:
                warnings.warn_explicit(warning.message, warning.category, warning.filename, warning.lineno)


@contextlib.contextmanager
def _warnings_in_lines() -> Iterator[None]:
    """Prints warnings of modtrace in the block as lines, without a place in the command's source."""
    before = warnings.formatwarning

    def format_warning(message: Any, category: type[Warning], *place: Any, **line: Any) -> str:
        if issubclass(category, ModtraceWarning):
            return f"modtrace: warning: {message}\n"
        return before(message, category, *place, **line)

    warnings.formatwarning = format_warning
    try:
        yield
    finally:
        if warnings.formatwarning is format_warning:
            warnings.formatwarning = before


def _describe_progress(progress: Any) -> str:
    held = f" ({progress.held:,} held)" if progress.held else ""
    return f"{count_of(progress.steps, 'step')}{held}, {describe_size(progress)}"
