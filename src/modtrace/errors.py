"""What modtrace raises about the world; a bad argument is a plain `ValueError` or `TypeError`.

ModtraceError
├── RecordingError            a recording that cannot be read or written
│   ├── RecordingNotFoundError    nothing is at that path (also a FileNotFoundError)
│   ├── NotARecordingError        something else is there
│   ├── NewerSchemaError          written by a newer modtrace
│   ├── DamagedRecordingError     a file of it cannot be understood
│   ├── NothingRecordedError      it has no rows that could answer what is asked (also a ValueError)
│   └── RecordingExistsError      `to=` names a folder that is there (also a FileExistsError)
├── MisuseError               calls in an order that cannot work (also a RuntimeError)
└── MissingLibraryError       an optional library is not installed (also an ImportError)

ModtraceWarning               each text has a heading in docs/messages.md (also a UserWarning)
"""


class ModtraceError(Exception):
    """Base of everything modtrace raises about the world."""


class RecordingError(ModtraceError):
    """A recording cannot be read or written."""


class RecordingNotFoundError(RecordingError, FileNotFoundError):
    """Nothing is at the path given as a recording."""


class NotARecordingError(RecordingError):
    """What is at the path is not a recording of modtrace."""


class NewerSchemaError(RecordingError):
    """The recording was written by a newer modtrace than this one."""


class DamagedRecordingError(RecordingError):
    """A file of the recording cannot be understood."""


class NothingRecordedError(RecordingError, ValueError):
    """The recording has no rows that could answer what is asked: an answer would be about nothing."""


class RecordingExistsError(RecordingError, FileExistsError):
    """A recording was to be written where something is already."""


class MisuseError(ModtraceError, RuntimeError):
    """Calls came in an order that cannot work."""


class MissingLibraryError(ModtraceError, ImportError):
    """An optional library is needed and not installed."""


class ModtraceWarning(UserWarning):
    """Something went wrong that the run was not stopped for."""
