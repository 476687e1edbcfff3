"""Tracks the recordings that run in this process: each has its own path, and abandoned ones are ended."""

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

    owner: weakref.ref[object]  # refers to the user's `LiveRecording`
    real_path: str | None  # the path of the folder; None for a recording in memory
    recorder: Recorder | None = None  # None if it has not begun


_running: list[Running] = []
_changing = threading.Lock()


def _forget_in_fork() -> None:
    """Forgets the recordings, which belong to the parent, and replaces the lock, which one of its threads may hold."""
    global _changing
    _running.clear()
    _changing = threading.Lock()


if hasattr(os, "register_at_fork"):  # Windows has no fork
    os.register_at_fork(after_in_child=_forget_in_fork)


def claim(owner: object, path: Path | None) -> Running:
    """Registers the recording of `owner`, until `release`.

    Raises:
        MisuseError: another recording writes to the path.
    """
    _end_forgotten()
    running = Running(weakref.ref(owner), None if path is None else os.path.realpath(path))
    with _changing:
        if path is not None and any(other.real_path == running.real_path for other in _running):
            raise MisuseError(
                f"{path}: record() is writing there already in this process. "
                "Give the inner one another path, or remove it; one that was started is ended by its stop()."
            )
        _running.append(running)
    return running


def release(running: Running) -> None:
    """Removes a recording that `claim` registered."""
    with _changing:
        if running in _running:
            _running.remove(running)


def list_recordings() -> list[tuple[object, int]]:
    """Returns the user's recordings that run, each with the number of its running step. It takes no lock."""
    found = [(running.owner(), running.recorder) for running in [*_running]]
    return [
        (owner, recorder.steps_ended)
        for owner, recorder in found
        if owner is not None and recorder is not None
    ]


def warn_if_any_is_held() -> None:
    """Warns the user, two callers up, if a recording runs that the user can still stop."""
    if any(running.owner() is not None for running in _running):
        warnings.warn(
            "another recording is still running: both record from now on, and its stop() ends it",
            ModtraceWarning,
            stacklevel=3,
        )


def _end_forgotten() -> None:
    """Ends recordings whose `LiveRecording` is gone, as when a notebook cell is run again.

    They are not ended when that object is freed, as the garbage collector may run in the middle of our hooks.
    """
    for forgotten in [running for running in _running if running.owner() is None]:
        release(forgotten)
        if forgotten.recorder is not None:
            try:
                forgotten.recorder.stop()
            except Exception as error:  # this does not concern the recording that is about to begin
                forgotten.recorder.failed(error, "when recording ended")
            warnings.warn(
                "a recording was still running that nothing refers to any more: it has been ended",
                ModtraceWarning,
                stacklevel=5,
            )
