"""The recordings that run in this process: each has a place of its own; those that nobody can stop are ended."""

import os
import threading
import warnings
import weakref
from dataclasses import dataclass
from pathlib import Path

from ...errors import MisuseError, ModtraceWarning
from .recorder import Recorder


@dataclass(eq=False)
class Running:
    """A recording that runs, or is about to."""

    held: weakref.ref[object]  # what the user has of it
    place: str | None  # where it is written; None: in memory
    recorder: Recorder | None = None  # None: it has not begun


_running: list[Running] = []
_changing = threading.Lock()


def claim(holder: object, path: Path | None) -> Running:
    """Adds the recording that `holder` stands for, until `release`.

    Raises:
        MisuseError: another one writes to the path.
    """
    _end_forgotten()
    running = Running(weakref.ref(holder), None if path is None else os.path.realpath(path))
    with _changing:
        if path is not None and any(each.place == running.place for each in _running):
            raise MisuseError(
                f"{path}: record() is writing there already in this process. "
                "Give the inner one another path, or remove it; one that was started is ended by its stop()."
            )
        _running.append(running)
    return running


def release(running: Running) -> None:
    """Removes what `claim` has added."""
    with _changing:
        if running in _running:
            _running.remove(running)


def is_any_held() -> bool:
    """Returns whether a recording runs that the user can stop."""
    return any(each.held() is not None for each in _running)


def _end_forgotten() -> None:
    """Ends those whose object is gone, as when a cell of a notebook is run again.

    The object's death itself does not end them: Python's garbage collector may run in the middle of our hooks.
    """
    for each in [each for each in _running if each.held() is None]:
        release(each)
        if each.recorder is not None:
            each.recorder.stop()
            warnings.warn(
                "a recording was still running that nothing refers to any more: it has been ended",
                ModtraceWarning,
                stacklevel=5,
            )
