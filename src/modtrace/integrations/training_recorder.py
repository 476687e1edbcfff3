"""Makes the recordings of a callback: one each time that its framework begins to train."""

import contextlib
import os
from collections.abc import Callable, Iterable, Mapping
from functools import wraps
from pathlib import Path
from typing import Any

from ..api.live import LiveRecording
from ..api.record import record
from ..errors import MisuseError


class TrainingRecorder:
    """Base class of the callbacks. `recording` is the newest recording of this process; None before the first one."""

    def __init__(self, to: str | os.PathLike[str] | None = None, **options: Any) -> None:
        """Creates a callback, which records nothing before training begins.

        Args:
            to: the folder of the first recording, as for `modtrace.record`. Later trainings with this callback go to
                `run-2.modtrace`, `run-3.modtrace` and so on.
            options: the keyword arguments of `modtrace.record`.

        Raises:
            TypeError, ValueError, MissingLibraryError: as `modtrace.record`.
        """
        super().__init__()
        record(None, to, **options)  # checks the options before a model is loaded
        self._to = None if to is None else Path(to)
        self._options = options
        self._begun = 0
        self.recording: LiveRecording | None = None

    def __getstate__(self) -> dict[str, Any]:
        """Returns what processes are started with: a recording stays in its own process."""
        return {**self.__dict__, "recording": None}

    def _begin(self, model: object) -> None:
        self._end()  # that of a training which ended without notice, as an attempt with a larger batch does
        self._begun += 1
        to = self._to
        if to is not None and self._begun > 1:
            to = to.with_name(f"{to.stem}-{self._begun}{to.suffix}")
        self.recording = record(model, to, **self._options).__enter__()

    def _log(self, scalars: Mapping[str, Any]) -> None:
        """Adds scalars to the open step, without those that are no numbers."""
        for name, value in scalars.items():
            with contextlib.suppress(MisuseError, TypeError):  # MisuseError: the recording has ended
                if self.recording is not None:
                    self.recording.log(**{name: value})

    def _end(self, error: BaseException | None = None) -> None:
        """Ends the recording, if it has not ended; `error` is the exception that ended training."""
        if self.recording is not None:
            self.recording.__exit__(None if error is None else type(error), error, None)


def end_when_raising(train: Callable[..., Any], find: Callable[..., Iterable[object]]) -> Callable[..., Any]:
    """Returns a function that calls `train`, and ends recordings when it raises.

    A finalizer of something in the frames of `train` would not do: a traceback that is kept, as a notebook keeps that
    of a failed cell (`sys.last_exc`), keeps them alive.

    Args:
        train: the function that trains.
        find: returns the callbacks that may have begun a recording, from the arguments of `train`.
    """

    @wraps(train)
    def train_or_end(*args: Any, **kwargs: Any) -> Any:
        try:
            return train(*args, **kwargs)
        except BaseException as error:
            for callback in find(*args, **kwargs):
                if isinstance(callback, TrainingRecorder):
                    callback._end(error)
            raise

    return train_or_end
