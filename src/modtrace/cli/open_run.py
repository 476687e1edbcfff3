"""Opens recordings for the commands, reads the requested step, and explains wrong options."""

import gc
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import NamedTuple

import click

from ..analysis.tables.chosen_step import STEP_NAMES, ShownStep, count_training, find_step
from ..analysis.tables.missing_rows import require_ops, require_rows, say_missing
from ..analysis.tables.ranks import as_one, describe_ranks, find_missing
from ..errors import NothingRecordedError, RecordingError
from ..recording.protocols import RecordingData
from ..recording.suggestions import did_you_mean, ranges_of
from ..store.reader import FolderReader, open_last_attempts
from ..store.snapshot import Snapshot
from .output import TRAINING_COUNTS

#: The type of the value of `--step` before the recording is open.
AskedStep = int | str | None

#: The key in click's context for the ranks that `--rank` chooses.
_ASKED_RANKS = "modtrace.ranks"

SHOWN_STEP = "The step to show. Default: the last complete training step."
SHOWN_ALONE = "The only step that is shown. Default: medians of the newest training steps, at most 50."
_HOW = f"a number, -1 for the last, or {', '.join(STEP_NAMES)}"


def open_with_rows(run: str, *tables: str, reads_all: bool = False) -> RecordingData:
    """Returns the recording in the folder `run`: of several ranks the one that `--rank` chooses, else the first.

    Args:
        run: the folder.
        tables: tables that have to have rows.
        reads_all: the command reads all ranks itself if `--rank` chooses none.

    Raises:
        NothingRecordedError: one of the tables has no rows; the message says why.
        ModtraceError: it cannot be read.
        click.BadParameter: there is no such rank, or `--rank` chooses several.
    """
    asked = click.get_current_context().meta.get(_ASKED_RANKS)
    if asked is None and reads_all:
        return _check(run, FolderReader(run), tables)
    data: RecordingData
    if asked is None:
        last, own = open_last_attempts(run), FolderReader(run)
        data = own if own.folder == last[0][1].folder else last[0][1]
        _remember(data)
        if len(last) > 1:
            shown = f"Rank {last[0][0]} of {len(last)} is shown"
            click.echo(f"{shown}. --rank N shows another; modtrace ranks compares all.", err=True)
    else:
        [(_, data), *more], _ = open_chosen_ranks(run)
        if more:
            command = click.get_current_context().info_name
            raise click.BadParameter(
                f"modtrace {command} shows one rank: give its number", param_hint="--rank"
            )
    return _check(run, data, tables)


def open_together(run: str, *tables: str) -> RecordingData:
    """Returns the recording in the folder `run` as it is now; the ranks that `--rank` chooses, of several, as one.

    Raises: as `open_with_rows`.
    """
    ranks, missing = open_chosen_ranks(run)
    if missing:
        click.echo(
            f"Ranks of {run} are missing: {ranges_of(missing)}. What they had is not compared.", err=True
        )
    return _check(run, as_one([(rank, hold(data)) for rank, data in ranks], missing), tables)


def hold(data: RecordingData) -> RecordingData:
    """Returns a recording; of one that is still being written what is there now."""
    return Snapshot(data) if isinstance(data, FolderReader) and not data.is_closed else data


class ChosenRanks(NamedTuple):
    """The ranks of a recording that `--rank` chooses."""

    ranks: list[tuple[int, RecordingData]]  # ascending, at least one
    missing: tuple[int, ...]  # the ranks of the run that have no folder


def open_chosen_ranks(run: str) -> ChosenRanks:
    """Returns the ranks that `--rank` chooses of the recording in the folder `run`, all by default.

    After a restart only what ran since is read. A rank that cannot be read is left out, with a word on standard error.

    Raises:
        click.BadParameter: there is no such rank.
        ModtraceError: none of them can be read.
    """
    asked: slice | None = click.get_current_context().meta.get(_ASKED_RANKS)
    found: list[tuple[int, RecordingData]] = [*open_last_attempts(run)]
    _remember(found[0][1])
    chosen = [(rank, data) for rank, data in found if asked is None or asked.start <= rank < asked.stop]
    if not chosen:
        there = describe_ranks(rank for rank, _ in found)
        raise click.BadParameter(f"the recording {run} has {there}", param_hint="--rank")
    return ChosenRanks(_readable(chosen), find_missing(found))


def _remember(data: RecordingData) -> None:
    """Lets `print_view` tell the numbers of training steps in the first recording that the command opens."""
    counts = partial(count_training, data)
    click.get_current_context().meta.setdefault(TRAINING_COUNTS, counts)


def _readable(ranks: list[tuple[int, RecordingData]]) -> list[tuple[int, RecordingData]]:
    if len(ranks) == 1:
        return ranks
    damaged: dict[int, RecordingError] = {}
    for rank, data in ranks:
        try:
            for table in ("modules", "sites", "steps", "calls", "values"):
                data.table(table)
        except RecordingError as error:
            damaged[rank] = error
            click.echo(f"Rank {rank} is left out, because it cannot be read: {error}", err=True)
    if len(damaged) == len(ranks):
        raise damaged[ranks[0][0]]
    return [(rank, data) for rank, data in ranks if rank not in damaged]


def _check(run: str, data: RecordingData, tables: Sequence[str]) -> RecordingData:
    # The answers on 50,000 modules are millions of objects, and hardly one in a circle: looking for circles after each
    # 700 new objects takes a fifth of the time.
    gc.set_threshold(200_000, 20, 20)
    with errors_of(run, data):
        for table in tables:
            require_rows(data, table)
    return data


class RankOption(click.Option):
    """The option `--rank` of a command that reads a recording, which `open_run` remembers."""

    def __init__(self) -> None:
        super().__init__(
            ["--rank"],
            metavar="N|A:B|all",
            type=_to_ranks,
            expose_value=False,
            callback=_remember_ranks,
            help="Of a recording of several ranks: the one to read, or several. Default: all, or the first.",
        )


def _to_ranks(text: str) -> slice:
    """Returns the range of ranks that a text names."""
    if text == "all":
        return slice(0, sys.maxsize)
    first, colon, end = text.partition(":")
    try:
        start = int(first or 0)
        stop = (int(end) if end else sys.maxsize) if colon else start + 1
    except ValueError:
        start, stop = -1, -1
    if not text or not 0 <= start < stop:
        raise click.BadParameter(f"{text!r} names no rank: give a number, a range such as 0:8, or all")
    return slice(start, stop)


def _remember_ranks(context: click.Context, option: click.Parameter, asked: slice | None) -> None:
    context.meta[_ASKED_RANKS] = asked


def step_option(about: str) -> Callable[[click.decorators.FC], click.decorators.FC]:
    """Returns the option `--step`; its help is the sentence `about` of the command, and the possible values."""
    first, *rest = about.partition(".")
    return click.option("--step", type=to_asked_step, metavar="STEP", help=f"{first}: {_HOW}{''.join(rest)}")


def steps_option() -> Callable[[click.decorators.FC], click.decorators.FC]:
    """Returns the option `--steps`, the range of the steps whose medians are shown."""
    about = (
        "The steps whose medians to show: 5: begins with step 5, 5:20 ends before 20. At most the 50 newest."
    )
    return click.option("--steps", metavar="START:STOP", help=about)


def to_asked_step(text: str) -> int | str:
    """Returns a number, or one of the names of steps.

    Raises:
        click.BadParameter: the text is neither.
    """
    if text in STEP_NAMES:
        return text
    try:
        return int(text)
    except ValueError:
        near = did_you_mean(text, STEP_NAMES)
        raise click.BadParameter(f"{text!r} is no step: give {_HOW}.{near}") from None


def read_step(run: str, data: RecordingData, asked: AskedStep) -> int | None:
    """Returns the number of the requested step.

    Raises:
        click.BadParameter: the recording that was opened from `run` has no such step.
    """
    with errors_of(run, data, option="--step"):
        return find_step(data, asked)


def require_ops_of(data: RecordingData, step: ShownStep | None, phase: str | None = None) -> None:
    """Raises NothingRecordedError if the step, or the phase of it, has no ops, or if there is no step."""
    if step is None:
        require_rows(data, "calls")
    else:
        require_ops(data, step.step, phase)


@contextmanager
def errors_of(run: str, data: RecordingData, *, option: str | None = None) -> Iterator[None]:
    """Names the recording and the option in the errors of the block, which computes an answer.

    Args:
        run: the path of the recording.
        data: the recording that was opened from it.
        option: as for `usage_errors`.

    Raises:
        NothingRecordedError: there are no rows for the answer.
        click.UsageError: the block raised a ValueError: an option selects something that does not exist.
    """
    with usage_errors(option):
        try:
            yield
        except NothingRecordedError as error:
            raise NothingRecordedError(f"{run}: {error}") from error
        except ValueError as error:
            missing = say_missing(data.meta.marks)
            end = "" if str(error).endswith((".", "?")) else "."
            raise ValueError(f"{error}{end}{missing}" if missing else str(error)) from error


@contextmanager
def usage_errors(option: str | None = None) -> Iterator[None]:
    """Turns a `ValueError` of the block into an error of usage.

    Args:
        option: the option that the error is about; None if the text begins with the argument, as in `steps='5:5'`.
    """
    try:
        yield
    except NothingRecordedError:
        raise
    except ValueError as error:
        option = option or _find_option(str(error))
        if option is None:
            raise click.UsageError(str(error)) from error
        raise click.BadParameter(str(error), param_hint=option) from error


def _find_option(text: str) -> str | None:
    """Returns the option of the running command with which a text begins: `steps=...`, `filter(op=...)`."""
    if re.match(r"filter\(\w+=.*, \w+=", text):  # only the combination selects nothing
        return None
    argument = re.match(r"(?:filter\()?(\w+)(\[\d+\])?[=(]", text)
    context = click.get_current_context(silent=True)
    if argument is None or context is None:
        return None
    option = f"--{argument[1].replace('_', '-')}"
    named = [parameter for parameter in context.command.params if parameter.name == argument[1]]
    known = [known for parameter in (*named, *context.command.params) for known in parameter.opts]
    return option if option in known else named[0].opts[0] if named and known[0].startswith("--") else None
