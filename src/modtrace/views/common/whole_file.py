"""Writes files atomically."""

import os
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import IO, Any

from ...errors import ModtraceError, system_errors


def write_pieces(pieces: Iterable[str], path: str | os.PathLike[str]) -> None:
    """Writes pieces of text to a file, which replaces an existing one when all are written.

    A path that is not a regular file (`/dev/stdout`, a named pipe) is written to directly.

    Raises:
        ModtraceError: it cannot be written. An existing file is unchanged.
    """
    _write_whole(path, lambda file: file.writelines(pieces), mode="w", encoding="utf-8", newline="\n")


def write_content(content: bytes, path: str | os.PathLike[str]) -> None:
    """Writes bytes to a file, as `write_pieces` writes text."""
    _write_whole(path, lambda file: file.write(content), mode="wb")


def errors_told(path: str | os.PathLike[str]) -> AbstractContextManager[None]:
    """Turns an error of the system in the block into one that names the path being written.

    Raises:
        ModtraceError: the path cannot be written to.
    """

    def say(error: OSError) -> ModtraceError:
        why = error.strerror or error
        return ModtraceError(f"{os.fspath(path)}: cannot be written: {why}. Give another path.")

    return system_errors(say)


def _write_whole(path: str | os.PathLike[str], write: Callable[[IO[Any]], Any], **how: Any) -> None:
    with errors_told(path):
        if os.path.exists(path) and not os.path.isfile(path):
            _write(Path(path), write, how)
        else:
            _replace(Path(os.path.realpath(path)), write, how)  # a link at `path` stays a link


def _replace(path: Path, write: Callable[[IO[Any]], Any], how: dict[str, Any]) -> None:
    beside = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    try:
        _write(beside, write, how)
        os.replace(beside, path)
    finally:
        beside.unlink(missing_ok=True)


def _write(path: Path, write: Callable[[IO[Any]], Any], how: dict[str, Any]) -> None:
    with open(path, **how) as file:
        write(file)
