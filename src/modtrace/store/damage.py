"""Makes the errors for damaged or unreadable recordings, which say what is wrong with a file and what to do."""

from pathlib import Path

from ..errors import DamagedRecordingError, RecordingError
from ..recording.schema import SCHEMA_VERSION


def damaged_batch(path: Path, number: int, start: int, why: object) -> DamagedRecordingError:
    """Returns the error for a batch that is complete but wrong; it begins at byte `start`."""
    return DamagedRecordingError(
        f"{path}: batch {number} is damaged: {why}. Copy the file again, cut it at byte {start} to read what lies "
        "before, or delete it to read the other tables."
    )


def not_a_stream(path: Path, size: int) -> DamagedRecordingError:
    """Returns the error for a file of this many bytes that is no table."""
    return DamagedRecordingError(
        f"{path}: not an Arrow stream ({size} bytes). "
        "Copy the file again, or delete it to read the other tables."
    )


def other_columns(path: Path, why: object) -> DamagedRecordingError:
    """Returns the error for a stream that is not one of its table."""
    return DamagedRecordingError(
        f"{path}: its columns are not those of the table: {why}. Delete the file to read the other tables."
    )


def unclear_header(path: Path, size: int, why: object) -> DamagedRecordingError:
    """Returns the error for a `recording.json` of this many bytes."""
    return DamagedRecordingError(
        f"{path}: cannot be understood ({size} bytes; {why}). "
        f'Put {{"schema_version": {SCHEMA_VERSION}}} into it to read the tables beside it.'
    )


def no_header_yet(path: Path) -> DamagedRecordingError:
    """Returns the error for a recording whose `recording.json` still has its temporary name."""
    return DamagedRecordingError(
        f"{path}: the run ended while it made this recording, or is about to make it: recording.json is not in its "
        "place yet. Record again."
    )


def no_rank(path: Path, content: str) -> DamagedRecordingError:
    """Returns the error for a recording that has no folder of a rank."""
    return DamagedRecordingError(
        f"{path}: no rank has written to this recording: rank-00000 is missing ({content}). Record again."
    )


def too_long(path: Path, size: int, most: int) -> DamagedRecordingError:
    """Returns the error for a file with more bytes than will be read."""
    return DamagedRecordingError(
        f"{path}: a file of {size} bytes, and at most {most} are read of it. Copy it again."
    )


def not_regular(path: Path, kind: str) -> DamagedRecordingError:
    """Returns the error for a folder, a FIFO or the like in place of a file."""
    return DamagedRecordingError(
        f"{path}: a regular file is expected, and {kind} is there. Copy the file again."
    )


def not_safetensors(path: Path, size: int, why: object) -> DamagedRecordingError:
    """Returns the error for a file of this many bytes that does not hold whole tensors."""
    return DamagedRecordingError(f"{path}: not a safetensors file ({size} bytes; {why}). Copy it again.")


def cut_tensor(path: Path, size: int, name: str, stop: int) -> DamagedRecordingError:
    """Returns the error for a tensor whose file ends before its last byte."""
    return DamagedRecordingError(
        f"{path}: cut at byte {size}, and {name!r} ends at byte {stop}. "
        "Copy the file again; the tensors in front of it can be read."
    )


def unreadable(path: Path, error: OSError) -> RecordingError:
    """Returns the error for a file that the system refuses to let us read."""
    return RecordingError(f"{path}: cannot be read: {error.strerror or error}. Check that you may read it.")
