"""Creates the folder that a rank writes to. Nothing is deleted except a recording that is to be replaced, or empty."""

import contextlib
import os
import shutil
import time
from collections.abc import Iterator
from pathlib import Path

from ..errors import (
    DamagedRecordingError,
    NewerSchemaError,
    NotARecordingError,
    RecordingError,
    RecordingExistsError,
)
from ..recording.meta import RunMeta
from ..recording.process import is_running
from .json_files import is_temporary_header, read_header, read_meta, write_header
from .layout import (
    HEADER,
    META,
    STARTING,
    describe_content,
    is_rank_folder,
    rank_folder,
    rank_folders,
    rank_of,
)
from .regular_file import folder_identity
from .same_run import is_anothers, is_of_same_run, is_restarted

_ATTEMPTS = 10_000
_LOOK_AFTER_S = 0.01
_STARTED_AFTER_S = 10.0  # a start takes milliseconds; one that has not ended after this was killed

#: A prefix for the names of files to be replaced, until the run has begun.
_REPLACED = ".replaced-"


def create_rank_folder(
    path: Path, meta: RunMeta, *, overwrite: bool, new_attempt: bool, agent_start_ns: int | None = None
) -> tuple[Path, str]:
    """Makes the folder of `meta.rank` in the recording `path`; joins one of the same run.

    Ranks that start at the same time do this one after the other.

    Args:
        path: the recording; an empty folder may be there.
        meta: the description of the run, which shows whether an existing recording is of the same run.
        overwrite: whether to replace an existing recording, or in one of the same run only this rank's part. Foreign
            files in it stay. `delete_replaced` deletes the old one, and `undo_rank_folder` restores it.
        new_attempt: whether to add `.attempt-1`, ... if this rank of this run already has a folder (an elastic
            restart).
        agent_start_ns: under torchrun, when its agent was started; what ranks of the launch wrote between then and the
            start of this process counts as earlier attempts, too.

    Returns:
        the folder, and the id of the run, which the first rank has chosen.

    Raises:
        RecordingExistsError: something exists that may not be replaced or joined.
        NotARecordingError: something was to be replaced that is no recording.
        RecordingError: the folder cannot be made.
    """
    try:
        with _alone_in(path):
            if agent_start_ns is not None and is_restarted(path, meta, agent_start_ns):
                new_attempt = True
            run_id = _prepare(path, meta, overwrite=overwrite, is_restart=new_attempt)
            if not new_attempt:
                _free(path, meta, overwrite=overwrite)
            return _create_exclusively(path, meta, new_attempt=new_attempt), run_id
    except RecordingError:  # RecordingExistsError is also an OSError
        raise
    except OSError as error:
        if overwrite and meta.world_size == 1:
            _restore_replaced(path)
        raise RecordingError(
            f"{path}: cannot write a recording here: {error.strerror or error}. Give another path."
        ) from error


@contextlib.contextmanager
def _alone_in(path: Path) -> Iterator[None]:
    """Makes the folder `path`, and lets only one process at a time into the block; others wait.

    The lock is a file that each process tries to create, as locks of the system do not work on all network file
    systems. A file that has not changed for some seconds was left by a killed process, and is removed.
    """
    lock = path / STARTING
    modified_ns, since_s = 0, time.monotonic()
    while True:
        _make_folder(path)
        try:
            os.close(os.open(lock, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666))
            break
        except FileNotFoundError:  # another process has undone its start
            continue
        except FileExistsError:
            time.sleep(_LOOK_AFTER_S)
        with contextlib.suppress(FileNotFoundError):
            made = lock.stat().st_mtime_ns
            if made != modified_ns:
                modified_ns, since_s = made, time.monotonic()
            elif time.monotonic() - since_s > _STARTED_AFTER_S:
                lock.unlink()
    try:
        yield
    finally:
        with contextlib.suppress(OSError):
            lock.unlink()


def _make_folder(path: Path) -> None:
    try:
        path.mkdir(parents=True)
    except FileExistsError:
        if not path.is_dir():
            raise RecordingExistsError(f"{path}: a file is here already. Give another path.") from None


def may_join(path: Path, meta: RunMeta) -> bool:
    """Returns whether other ranks of the run described by `meta` have begun to write to `path`."""
    with contextlib.suppress(OSError, RecordingError):  # on an error, another path is chosen
        header = _header_if_readable(path)
        if header is None:  # a rank that is starting has made the folder
            return bool(meta.launch) and path.is_dir() and _is_empty(path)
        own = [folder for folder in rank_folders(path) if rank_of(folder) == meta.rank]
        return is_of_same_run(path, header, meta) and not any(is_anothers(folder, meta) for folder in own)
    return False


def delete_if_empty(path: Path) -> bool:
    """Deletes the recording of one process that has ended and recorded nothing; returns whether `path` is free now."""
    with contextlib.suppress(OSError, RecordingError):
        if path.is_symlink() or not _is_left_empty(path):
            return False
        with _alone_in(path):  # another process may have begun to write here meanwhile
            if not _is_left_empty(path):
                return False
            for folder in rank_folders(path):
                shutil.rmtree(folder)
            (path / HEADER).unlink()
        path.rmdir()
        return True
    return False


def _is_left_empty(path: Path) -> bool:
    """Returns whether a folder is a recording of one process that has ended, without rows or files of others."""
    header = read_header(path)
    if header is None or header.launch:  # other ranks may join
        return False
    if any(entry.name not in (HEADER, STARTING) and not is_rank_folder(entry) for entry in path.iterdir()):
        return False
    folders = rank_folders(path)
    for folder in folders:
        stored = read_meta(folder)
        has_ended = stored.ended is not None or is_running(stored.meta.process) is False
        if stored.damage or stored.meta.world_size > 1 or not has_ended:
            return False
        if [file.name for file in folder.iterdir()] != [META]:
            return False
    return bool(folders)  # without any, a rank may be about to make its own


def delete_replaced(path: Path) -> None:
    """Deletes the replaced recording permanently. Errors are ignored."""
    with contextlib.suppress(OSError):
        for old in _replaced(path):
            shutil.rmtree(old) if old.is_dir() else old.unlink()


def undo_rank_folder(path: Path, folder: Path, *, is_only_rank: bool) -> None:
    """Deletes a rank's folder in which nothing was recorded, and restores what it was to replace.

    In a run with one rank, the header and an empty folder are deleted, too, so that the path is free for the next run.
    Otherwise the header stays, as another rank may be about to join.
    """
    with contextlib.suppress(OSError):
        if folder.exists():
            shutil.rmtree(folder)
        if is_only_rank:
            _restore_replaced(path)


def _restore_replaced(path: Path) -> None:
    """Restores what was to be replaced if no rank has a folder, and deletes the folder if it is empty then."""
    with contextlib.suppress(OSError):
        if rank_folders(path):
            return
        (path / HEADER).unlink(missing_ok=True)
        for old in _replaced(path):
            old.rename(path / old.name.removeprefix(_REPLACED))
        if not any(path.iterdir()):
            path.rmdir()


def _prepare(path: Path, meta: RunMeta, *, overwrite: bool, is_restart: bool) -> str:
    """Writes the header of the run, unless another rank has done so, and returns the id of the run."""
    if not _is_empty(path):
        header = _header_if_readable(path)
        if header is not None and is_of_same_run(path, header, meta, is_restart=is_restart):
            return header.run_id
        _make_room(path, overwrite=overwrite)
    write_header(path, meta)
    return meta.run_id


def _free(path: Path, meta: RunMeta, *, overwrite: bool) -> None:
    """Deletes what this rank wrote to the recording before, if it is to be replaced."""
    for folder in rank_folders(path):
        if rank_of(folder) != meta.rank:
            continue
        if is_anothers(folder, meta):
            raise RecordingExistsError(
                f"{path}: another process of this run writes here as rank {meta.rank} ({folder.name}). "
                "Give each rank its number (RANK), or another path."
            )
        if overwrite:
            shutil.rmtree(folder)


def _is_empty(path: Path) -> bool:
    """Returns whether a folder contains only temporary and replaced files of other ranks or of killed runs."""
    return all(
        is_temporary_header(entry) or entry.name == STARTING or entry.name.startswith(_REPLACED)
        for entry in path.iterdir()
    )


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
            "Give another path, or overwrite=True (--overwrite) to replace it."
        )
    delete_replaced(path)
    headers = [file for file in path.iterdir() if file.name == HEADER or is_temporary_header(file)]
    for file in (*headers, *rank_folders(path)):
        file.rename(path / f"{_REPLACED}{file.name}")


def _is_recording(path: Path) -> bool:
    """Returns whether a folder has a header of ours; a damaged one counts if there is a rank's folder beside it."""
    try:
        return read_header(path) is not None or any(map(is_temporary_header, path.iterdir()))
    except NewerSchemaError:
        return True
    except DamagedRecordingError:
        return bool(rank_folders(path))


def _replaced(path: Path) -> list[Path]:
    return [file for file in path.iterdir() if file.name.startswith(_REPLACED)]


def _create_exclusively(path: Path, meta: RunMeta, *, new_attempt: bool) -> Path:
    for attempt in range(meta.attempt, meta.attempt + _ATTEMPTS) if new_attempt else (0,):
        folder = rank_folder(path, meta.rank, attempt)
        try:
            folder.mkdir()
            return folder
        except FileExistsError:
            pass
    raise RecordingExistsError(
        f"{path}: rank {meta.rank} of run {meta.run_id!r} has written here already ({folder.name}). "
        "Give another path, or overwrite=True (--overwrite) to replace it."
    )


class HeldFolder:
    """A folder to which this process writes, and which others may replace, move or delete meanwhile."""

    def __init__(self, path: Path) -> None:
        """Opens the folder. As long as it is open, the system does not reuse its number.

        Raises:
            OSError: the folder does not exist.
        """
        self.path = path
        self._fd: int | None = None
        with contextlib.suppress(OSError):  # Windows cannot open folders, and too many files may be open
            self._fd = os.open(path, os.O_RDONLY | getattr(os, "O_CLOEXEC", 0))
        self._identity = folder_identity(path)

    def is_in_place(self) -> bool:
        """Returns whether the folder is still at its path; True if the system reports another error."""
        try:
            return folder_identity(self.path) == self._identity
        except (FileNotFoundError, NotADirectoryError):
            return False
        except OSError:
            return True

    def close(self) -> None:
        """Closes the folder. A second call does nothing."""
        fd, self._fd = self._fd, None
        if fd is not None:
            os.close(fd)
