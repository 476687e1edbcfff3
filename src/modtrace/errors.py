"""The exceptions that modtrace raises; a bad argument is a plain `ValueError` or `TypeError`.

ModtraceError
├── RecordingError            a recording that cannot be read or written
│   ├── RecordingNotFoundError    nothing is at that path (also a FileNotFoundError)
│   ├── NotARecordingError        something else is at that path
│   ├── NewerSchemaError          written by a newer modtrace
│   ├── DamagedRecordingError     a file of it cannot be understood
│   ├── RecordingReplacedError    another run has replaced it since it was opened
│   ├── NothingRecordedError      it has no rows for the requested answer (also a ValueError)
│   └── RecordingExistsError      the folder of `to=` exists already (also a FileExistsError)
├── MisuseError               calls in an order that cannot work (also a RuntimeError)
├── NonFiniteError            a NaN or infinity came up, and on_nonfinite="stop" was given (also an ArithmeticError)
└── MissingLibraryError       an optional library is not installed (also an ImportError)

ModtraceWarning               each text has a heading in docs/messages.md (also a UserWarning)
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager


class ModtraceError(Exception):
    """Base class of the exceptions that modtrace raises."""


class RecordingError(ModtraceError):
    """Raised if a recording cannot be read or written."""


class RecordingNotFoundError(RecordingError, FileNotFoundError):
    """Raised if nothing is at the path given as a recording."""


class NotARecordingError(RecordingError):
    """Raised if what is at the path is not a recording of modtrace."""


class NewerSchemaError(RecordingError):
    """Raised if the recording was written by a newer modtrace than this one."""


class DamagedRecordingError(RecordingError):
    """Raised if a file of the recording cannot be understood."""


class RecordingReplacedError(RecordingError):
    """Raised if another run has replaced a recording that is open, for reading or for writing."""


class NothingRecordedError(RecordingError, ValueError):
    """Raised if the recording has no rows for the requested answer, which would be empty."""


class RecordingExistsError(RecordingError, FileExistsError):
    """Raised if a recording is to be written to a path that exists already."""


class MisuseError(ModtraceError, RuntimeError):
    """Raised if calls come in an order that cannot work."""


class NonFiniteError(ModtraceError, ArithmeticError):
    """Raised by `record(on_nonfinite="stop")` when NaN or infinite values have come up."""


class MissingLibraryError(ModtraceError, ImportError):
    """Raised if an optional library is needed and not installed."""


@contextmanager
def system_errors(
    say: Callable[[OSError], Exception], passed: type[Exception] = ModtraceError
) -> Iterator[None]:
    """Turns an error of the system in the block into the exception that `say` returns for it.

    Errors of ours, some of which are also OSErrors, and those in `passed` are raised unchanged.
    """
    try:
        yield
    except (ModtraceError, passed):
        raise
    except OSError as error:
        raise say(error) from error


class ModtraceWarning(UserWarning):
    """Warns of something that went wrong but did not stop the run."""


#: The largest number of characters of an error's text that marks and messages repeat.
_LONGEST = 200


def describe_error(error: BaseException) -> str:
    """Returns the class of an error and the first line of its text, if it has one, without a full stop or a colon.

    Of a line of more than 200 characters it is the whole sentences that are not longer, or else the whole words, if
    these have more than 100 characters.
    """
    said = _first_line(error)
    return f"{type(error).__name__}: {said}" if said else type(error).__name__


def _first_line(error: BaseException) -> str:
    try:
        text = str(error)
    except Exception:  # a user's class may fail to describe itself
        return ""
    line = (text.strip().splitlines() or [""])[0]
    if len(line) > _LONGEST:
        begun = line[:_LONGEST]
        sentences, whole = begun.rpartition(". ")[0], begun.rpartition(" ")[0]
        line = f"{whole if len(whole) > _LONGEST // 2 else begun} …"
        line = sentences if len(sentences) > _LONGEST // 2 else line
    return line if line.endswith("..") else line.removesuffix(".").removesuffix(":")
