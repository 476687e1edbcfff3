"""The surface that a message is for, Python or the command line: each has its own words for what users give.

The command line sets itself as the surface; without that, the surface is Python. A message is written where the fault
is found, far below both surfaces, and callers may quote it, so it uses the words of the surface from the start.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

#: Names an argument and its value in the words of the command line: `--steps 5:5`.
Namer = Callable[[str, object], str]

_namer: Namer | None = None  # None: in those of Python


@contextmanager
def speak(namer: Namer | None) -> Iterator[None]:
    """Sets the surface of messages inside the block: the command line, or Python if `namer` is None.

    The setting is for the whole process. `modtrace record` sets Python while the program of its user runs.
    """
    global _namer
    before, _namer = _namer, namer
    try:
        yield
    finally:
        _namer = before


def surface_now() -> Namer | None:
    """Returns the surface that messages are for now, for `speak` to go back to."""
    return _namer


def name_argument(name: str, value: object) -> str:
    """Returns what a user gave, as the user gave it: `steps='5:5'`, or `--steps 5:5`."""
    return f"{name}={value!r}" if _namer is None else _namer(name, value)


def choose_phrase(*, python: str, command_line: str) -> str:
    """Returns the words of the surface, where they differ in more than the name of an argument."""
    return python if _namer is None else command_line
