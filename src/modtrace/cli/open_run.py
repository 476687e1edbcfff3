"""Opens recordings for the commands, reads the requested step, and explains wrong options."""

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import click

from ..analysis.tables.chosen_step import STEP_NAMES, ShownStep, find_step
from ..analysis.tables.missing_rows import require_ops, require_rows, say_missing
from ..errors import NothingRecordedError
from ..recording.protocols import RecordingData
from ..recording.suggestions import did_you_mean

#: The type of the value of `--step` before the recording is open.
AskedStep = int | str | None

SHOWN_STEP = "The step to show. Default: the last complete training step."
_HOW = f"a number, -1 for the last, or {', '.join(STEP_NAMES)}"


def open_with_rows(run: str, *tables: str) -> RecordingData:
    """Returns the recording in the folder `run`.

    Raises:
        NothingRecordedError: one of the tables has no rows; the message says why.
        ModtraceError: it cannot be read.
    """
    from ..api.recording import open_recording

    data = open_recording(run).data
    with errors_of(run, data):
        for table in tables:
            require_rows(data, table)
    return data


def step_option(about: str) -> Callable[[click.decorators.FC], click.decorators.FC]:
    """Returns the option `--step`; its help is the sentence `about` of the command, and the possible values."""
    first, *rest = about.partition(".")
    return click.option("--step", type=to_asked_step, metavar="STEP", help=f"{first}: {_HOW}{''.join(rest)}")


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
            raise ValueError(f"{str(error).rstrip('.')}.{missing}" if missing else str(error)) from error


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
    return option if any(option in parameter.opts for parameter in context.command.params) else None
