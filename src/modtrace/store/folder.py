"""Creates the folder that a rank writes to. It deletes nothing except a recording that is to be replaced."""

import contextlib
import shutil
from pathlib import Path

from ..errors import (
    DamagedRecordingError,
    NewerSchemaError,
    NotARecordingError,
    RecordingError,
    RecordingExistsError,
)
from ..recording.meta import RunMeta
from ..surface import name_argument
from .header import is_temporary_header, read_header, write_header
from .layout import HEADER, describe_content, rank_folder, rank_folders

_ATTEMPTS = 10_000

#: In front of the names of what is to be replaced, until the run has begun.
_REPLACED = ".replaced-"


def create_rank_folder(path: Path, meta: RunMeta, *, overwrite: bool, new_attempt: bool) -> Path:
    """Makes the folder of `meta.rank` in the recording `path`; joins one of the same run.

    Args:
        path: the recording; an empty folder may be there.
        meta: its `run_id` says whether a recording that is there is of the same run; an empty one is of none.
        overwrite: replace a recording that is there; of the same run, only this rank's part. Files in it
            that are not its own stay. `delete_replaced` deletes it, and `undo_rank_folder` puts it back.
        new_attempt: add `.attempt-1`, ... if this rank of this run has a folder already (an elastic restart).

    Raises:
        RecordingExistsError: something is there that may not be replaced or joined.
        NotARecordingError: it was to be replaced, and is no recording.
        RecordingError: the folder cannot be made.
    """
    try:
        _prepare(path, meta, overwrite=overwrite)
        if overwrite and not new_attempt:
            _delete_if_there(rank_folder(path, meta.rank))
        return _create_exclusively(path, meta, new_attempt=new_attempt)
    except RecordingError:  # RecordingExistsError is an OSError too
        raise
    except OSError as error:
        if overwrite and meta.world_size == 1:
            _put_back(path)
        raise RecordingError(
            f"{path}: cannot write a recording here: {error.strerror or error}. Give another path."
        ) from error


def delete_replaced(path: Path) -> None:
    """Deletes the replaced recording permanently. Errors are ignored."""
    with contextlib.suppress(OSError):
        for each in _replaced(path):
            shutil.rmtree(each) if each.is_dir() else each.unlink()


def undo_rank_folder(path: Path, folder: Path, *, is_only_rank: bool) -> None:
    """Deletes a folder of a rank that has recorded nothing, and puts back what it was to replace.

    Of a run with one rank the header and an empty folder go, too, so that the path is free for the next run. Another
    rank may be about to join: then the header stays.
    """
    with contextlib.suppress(OSError):
        _delete_if_there(folder)
        if is_only_rank:
            _put_back(path)


def _put_back(path: Path) -> None:
    """Puts back what was to be replaced, where no rank has a folder; deletes the folder if nothing is left in it."""
    with contextlib.suppress(OSError):
        if rank_folders(path):
            return
        (path / HEADER).unlink(missing_ok=True)
        for each in _replaced(path):
            each.rename(path / each.name.removeprefix(_REPLACED))
        if not any(path.iterdir()):
            path.rmdir()


def _prepare(path: Path, meta: RunMeta, *, overwrite: bool) -> None:
    try:
        path.mkdir(parents=True)
    except FileExistsError:
        if not path.is_dir():
            raise RecordingExistsError(f"{path}: a file is here already. Give another path.") from None
        if not _is_empty(path):
            header = _header_if_readable(path)
            if header is not None and header.run_id == meta.run_id != "":
                return
            _make_room(path, overwrite=overwrite)
    write_header(path, meta)


def _is_empty(path: Path) -> bool:
    """Returns whether a folder contains only temporary and replaced files of other ranks or of killed runs."""
    return all(is_temporary_header(each) or each.name.startswith(_REPLACED) for each in path.iterdir())


def _header_if_readable(path: Path) -> RunMeta | None:
    try:
        return read_header(path)
    except (DamagedRecordingError, NewerSchemaError):
        return None


def _make_room(path: Path, *, overwrite: bool) -> None:
    if not _is_recording(path):
        kind = NotARecordingError if overwrite else RecordingExistsError
        raise kind(
            f"{path}: a folder that is not a recording is here already ({describe_content(path)}); "
            "modtrace does not delete it. Give another path."
        )
    if not overwrite:
        header = _header_if_readable(path)
        created = f" (created {header.created})" if header is not None and header.created else ""
        raise RecordingExistsError(
            f"{path}: there is a recording here already{created}. "
            f"Give another path, or {name_argument('overwrite', True)} to replace it."
        )
    delete_replaced(path)
    headers = [each for each in path.iterdir() if each.name == HEADER or is_temporary_header(each)]
    for each in (*headers, *rank_folders(path)):
        each.rename(path / f"{_REPLACED}{each.name}")


def _is_recording(path: Path) -> bool:
    """Returns whether a folder has a header of ours. A damaged header counts if a rank's folder is beside it."""
    try:
        return read_header(path) is not None or any(map(is_temporary_header, path.iterdir()))
    except NewerSchemaError:
        return True
    except DamagedRecordingError:
        return bool(rank_folders(path))


def _replaced(path: Path) -> list[Path]:
    return [each for each in path.iterdir() if each.name.startswith(_REPLACED)]


def _delete_if_there(folder: Path) -> None:
    if folder.exists():
        shutil.rmtree(folder)


def _create_exclusively(path: Path, meta: RunMeta, *, new_attempt: bool) -> Path:
    for attempt in range(_ATTEMPTS if new_attempt else 1):
        folder = rank_folder(path, meta.rank, attempt)
        try:
            folder.mkdir()
            return folder
        except FileExistsError:
            pass
    raise RecordingExistsError(
        f"{path}: rank {meta.rank} of run {meta.run_id!r} has written here already ({folder.name}). "
        f"Give another path, or {name_argument('overwrite', True)} to replace it."
    )
