"""Opens recordings for the commands, and explains wrong options and missing answers."""

from collections.abc import Callable
from functools import partial
from typing import Protocol, TypeVar

import click

from ..analysis.tables.chosen_step import ShownStep
from ..analysis.tables.missing_rows import require_ops, require_rows, say_missing
from ..api.model_graph import ModelGraph
from ..errors import NothingRecordedError
from ..recording.phase import PHASES
from ..recording.protocols import RecordingData


class _OfStep(Protocol):
    @property
    def step(self) -> ShownStep | None: ...


Answer = TypeVar("Answer")
AnswerOfStep = TypeVar("AnswerOfStep", bound=_OfStep)


def open_with_rows(run: str, *tables: str) -> RecordingData:
    """Returns the recording in the folder `run`.

    Raises:
        NothingRecordedError: one of the tables has no rows; the message says why.
        ModtraceError: it cannot be read.
    """
    from ..api.recording import open_recording

    data = open_recording(run).data
    for table in tables:
        ask(run, data, partial(require_rows, data, table))
    return data


def ask(
    run: str, data: RecordingData, find: Callable[[], Answer], *, option: str | None = "--step"
) -> Answer:
    """Returns the result of `find` for the recording that was opened from `run`.

    Args:
        run: the path of the recording.
        data: the recording.
        find: computes the answer.
        option: the option that a `ValueError` is about; None if its text names it.

    Raises:
        NothingRecordedError: there are no rows for the answer.
        click.ClickException: the option selects something that does not exist.
    """
    try:
        return find()
    except NothingRecordedError as error:
        raise NothingRecordedError(f"{run}: {error}") from error
    except ValueError as error:
        missing = say_missing(data.meta.marks)
        text = f"{str(error).rstrip('.')}.{missing}" if missing else str(error)
        if option is None:
            raise click.ClickException(text) from error
        raise click.BadParameter(text, param_hint=option) from error


def ask_for_ops(
    run: str, data: RecordingData, find: Callable[[], AnswerOfStep], phase: str | None = None
) -> AnswerOfStep:
    """Returns the result of `find`, which is about the ops of one step.

    Raises:
        NothingRecordedError: the step, or the phase of it, has no ops.
        click.BadParameter: there is no such step.
    """

    def find_with_ops() -> AnswerOfStep:
        found = find()
        if found.step is None:
            require_rows(data, "calls")
        else:
            require_ops(data, found.step.step, phase)
        return found

    return ask(run, data, find_with_ops)


def require_part(whole: ModelGraph, part: ModelGraph) -> ModelGraph:
    """Returns the part of a graph.

    Raises:
        NothingRecordedError: the part is empty, and the whole is not.
    """
    ran = whole.columns.nodes.phase
    if len(ran) and not len(part.columns.nodes):
        phases = ", ".join(each for code, each in enumerate(PHASES) if code in ran) or "none"
        missing = say_missing(whole.columns.marks)
        raise NothingRecordedError(
            f"no op of the step is in the part that was chosen; ops ran in: {phases}.{missing}"
        )
    return part
