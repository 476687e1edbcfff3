"""Opens recordings for the commands that need ops, and says what is wrong with their options."""

from collections.abc import Callable
from typing import TypeVar

import click

from ..analysis.step_ops import has_ops
from ..recording.protocols import RecordingData
from ..views.headline import NO_OPS_RECORDED

Answer = TypeVar("Answer")


def open_with_ops(run: str) -> RecordingData:
    """The recording in the folder `run`.

    Raises:
        click.ClickException: it has no ops.
        ModtraceError: it cannot be read.
    """
    from ..face import open_recording

    data = open_recording(run).data
    if not has_ops(data):
        raise click.ClickException(f"{run}: {NO_OPS_RECORDED}")
    return data


def with_step(build: Callable[[], Answer]) -> Answer:
    """What `build` gives.

    Raises:
        click.BadParameter: there is no such step.
    """
    try:
        return build()
    except ValueError as error:
        raise click.BadParameter(str(error), param_hint="--step") from error
