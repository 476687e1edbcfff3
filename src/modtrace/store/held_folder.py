"""Holds a folder open, so that another one that has come to lie at its path is told from it."""

import contextlib
import os
from pathlib import Path


class HeldFolder:
    """A folder in which this process writes, and which others may replace, move or delete meanwhile."""

    def __init__(self, path: Path) -> None:
        """Opens the folder. While it is open, the system gives its number to no other one.

        Raises:
            OSError: it is not there.
        """
        self.path = path
        self._fd: int | None = None
        with contextlib.suppress(OSError):  # Windows opens no folders, and files may be too many
            self._fd = os.open(path, os.O_RDONLY | getattr(os, "O_CLOEXEC", 0))
        self._identity = _identity(path)

    def is_in_place(self) -> bool:
        """Returns whether the folder is still at its path. An error of the system other than that says nothing."""
        try:
            return _identity(self.path) == self._identity
        except (FileNotFoundError, NotADirectoryError):
            return False
        except OSError:
            return True

    def close(self) -> None:
        """Closes the folder. A second call does nothing."""
        fd, self._fd = self._fd, None
        if fd is not None:
            os.close(fd)


def _identity(path: Path) -> tuple[int, int]:
    status = path.stat()
    return status.st_dev, status.st_ino
