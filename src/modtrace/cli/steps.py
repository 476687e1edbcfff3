"""The option `--step`: a number, a number from the end, or a word such as `last-train`."""

from collections.abc import Callable

import click

from ..analysis.tables.chosen_step import STEP_NAMES, find_step
from ..recording.protocols import RecordingData
from ..recording.suggestions import did_you_mean
from .with_ops import ask

#: What `--step` holds until the recording is open.
AskedStep = int | str | None

_HOW = f"a number, -1 for the last, or {', '.join(STEP_NAMES)}"
SHOWN_STEP = "The step to show. Default: the last complete training step."


def step_option(about: str) -> Callable[[click.decorators.FC], click.decorators.FC]:
    """Returns the option `--step`, whose help is a sentence of the command's and what can be given."""
    first, *rest = about.partition(".")
    return click.option("--step", type=to_asked_step, metavar="STEP", help=f"{first}: {_HOW}{''.join(rest)}")


def to_asked_step(text: str) -> int | str:
    """Returns a number, or one of the words that mean a step.

    Raises:
        click.BadParameter: it is neither.
    """
    if text in STEP_NAMES:
        return text
    try:
        return int(text)
    except ValueError:
        near = did_you_mean(text, STEP_NAMES)
        raise click.BadParameter(f"{text!r} is no step: give {_HOW}.{near}") from None


def read_step(run: str, data: RecordingData, asked: AskedStep) -> int | None:
    """Returns the number of the step that is asked for.

    Raises:
        click.BadParameter: the recording that was opened from `run` has no such step.
    """
    return ask(run, data, lambda: find_step(data, asked))
