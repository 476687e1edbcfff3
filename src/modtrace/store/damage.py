"""The texts about recordings that are damaged or unreadable: what is wrong with a file, and what to do."""

from pathlib import Path

from ..errors import DamagedRecordingError, RecordingError

BATCH = (
    "batch {number} is damaged: {why}. Copy the file again, cut it at byte {start} to read what lies before, or "
    "delete it to read the other tables."
)
NOT_A_STREAM = (
    "not an Arrow stream ({size} bytes). Copy the file again, or delete it to read the other tables."
)
OTHER_COLUMNS = "its columns are not those of the table: {why}. Delete the file to read the other tables."
HEADER_UNCLEAR = (
    "cannot be understood ({size} bytes; {why}). "
    'Put {{"schema_version": {version}}} into it to read the tables beside it.'
)
NO_HEADER_YET = (
    "the run ended while it made this recording, or is about to make it: recording.json is not in its place yet. "
    "Record again."
)
NO_RANK = "no rank has written to this recording: rank-00000 is missing ({content}). Record again."
TOO_LONG = "a file of {size} bytes, and at most {most} are read of it. Copy it again."
NOT_REGULAR = "a regular file is expected, and {kind} is there. Copy the file again."
NOT_SAFETENSORS = "not a safetensors file ({size} bytes; {why}). Copy it again."
TENSOR_IS_CUT = (
    "cut at byte {size}, and {name!r} ends at byte {stop}. "
    "Copy the file again; the tensors in front of it can be read."
)


def damaged(path: Path, text: str, **values: object) -> DamagedRecordingError:
    """Returns the error with one of the texts above, filled with these values."""
    return DamagedRecordingError(f"{path}: {text.format(**values)}")


def unreadable(path: Path, error: OSError) -> RecordingError:
    """Returns the error for a file that the system refuses to read."""
    return RecordingError(f"{path}: cannot be read: {error.strerror or error}. Check that you may read it.")
