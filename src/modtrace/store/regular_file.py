"""Opens the files of a recording, if they are regular and not larger than a bound."""

import mmap
import os
import stat
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from pathlib import Path

import numpy as np

from ..errors import DamagedRecordingError, RecordingError, system_errors
from .damage import not_regular, too_long, unreadable

#: Without O_NONBLOCK, opening a FIFO waits for a writer. Windows has only the first and the last of these flags.
_FLAGS = ("O_RDONLY", "O_NONBLOCK", "O_NOCTTY", "O_CLOEXEC", "O_BINARY")
_READ = sum(getattr(os, name, 0) for name in _FLAGS)
_MOST_AT_ONCE = 2**30  # one read of Linux returns at most 2 GB

_KINDS = {
    stat.S_IFDIR: "a folder",
    stat.S_IFIFO: "a FIFO",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
    stat.S_IFSOCK: "a socket",
}

FileState = tuple[int, int, int]


@contextmanager
def open_regular(path: Path) -> Iterator[int]:
    """Yields the descriptor of a regular file, open for reading.

    A symbolic link to a regular file is followed, because stores of large files (git-annex, DVC) keep links. The opened
    file is checked, not what was at the path before.

    Raises:
        FileNotFoundError: there is no file.
        DamagedRecordingError: it is a folder, a FIFO, a device or a socket.
        RecordingError: it cannot be opened or read.
    """
    # Opening a socket fails with ENXIO.
    with system_errors(lambda error: _describe_other(path) or unreadable(path, error), FileNotFoundError):
        fd = os.open(path, _READ)
    try:
        with reading(path, FileNotFoundError):
            mode = os.fstat(fd).st_mode
            if not stat.S_ISREG(mode):
                raise _no_file(path, mode)
            yield fd
    finally:
        os.close(fd)


def read_regular(path: Path, most_bytes: int | None = None) -> memoryview:
    """Returns the content of a regular file, up to the size that it has when it is opened.

    Raises:
        FileNotFoundError: there is no file.
        DamagedRecordingError: it is not a regular file, or longer than `most_bytes` (None: no limit).
        RecordingError: it cannot be read.
    """
    with open_regular(path) as fd:
        size = os.fstat(fd).st_size
        if most_bytes is not None and size > most_bytes:
            raise too_long(path, size=size, most=most_bytes)
        return read_range(path, fd, 0, size)


def map_regular(path: Path) -> memoryview:
    """Returns the content of a regular file to which no process writes any more, memory-mapped.

    The file is read instead if it, or its size, has changed when it is mapped, because reading a mapped file that
    becomes shorter kills the process (SIGBUS).

    Raises:
        FileNotFoundError: there is no file.
        DamagedRecordingError: it is not a regular file.
        RecordingError: it cannot be read.
    """
    with open_regular(path) as fd:
        opened = os.fstat(fd)
        if opened.st_size:
            mapped = mmap.mmap(fd, opened.st_size, access=mmap.ACCESS_READ)
            now = path.stat()
            if (now.st_dev, now.st_ino, now.st_size) == (opened.st_dev, opened.st_ino, opened.st_size):
                return memoryview(mapped)
        return read_range(path, fd, 0, opened.st_size)


def file_state(file: Path) -> FileState:
    """Returns properties of a file that change if it is appended to or replaced."""
    status = file.stat()
    return status.st_ino, status.st_size, status.st_mtime_ns


def folder_identity(folder: Path) -> tuple[int, int]:
    """Returns numbers that identify a folder as long as it is open."""
    status = folder.stat()
    return status.st_dev, status.st_ino


def read_range(path: Path, fd: int, start: int, stop: int) -> memoryview:
    """Returns the bytes from `start` to `stop` of a file, or fewer if it ends before.

    Raises:
        RecordingError: there is no memory for them.
        OSError: they cannot be read.
    """
    try:
        data = np.empty(stop - start, np.uint8).data
    except (MemoryError, ValueError) as error:
        raise RecordingError(
            f"{path}: no memory for {stop - start} bytes of it. Read it where there is more."
        ) from error
    done = 0
    while done < len(data):
        count = _read_into(data[done : done + _MOST_AT_ONCE], fd, start + done)
        if not count:
            break
        done += count
    return data[:done].toreadonly()


def _read_into(data: memoryview, fd: int, start: int) -> int:
    if hasattr(os, "preadv"):
        return os.preadv(fd, [data], start)
    with open(fd, "rb", buffering=0, closefd=False) as file:  # for Windows
        file.seek(start)
        return file.readinto(data) or 0


def reading(path: Path, passed: type[Exception] = RecordingError) -> AbstractContextManager[None]:
    """Turns errors of the system in the block into `unreadable`; our own errors, and `passed`, are raised unchanged."""
    return system_errors(partial(unreadable, path), passed)


def _describe_other(path: Path) -> RecordingError | None:
    """Returns the error for a path that cannot be opened as a file; None if it is a regular file."""
    try:
        mode = path.stat().st_mode
    except OSError:
        return None
    return None if stat.S_ISREG(mode) else _no_file(path, mode)


def _no_file(path: Path, mode: int) -> DamagedRecordingError:
    return not_regular(path, kind=_KINDS.get(stat.S_IFMT(mode), "something else"))
