"""Writes a file wholly or not at all."""

import os
from collections.abc import Iterable
from pathlib import Path

from ..errors import ModtraceError


def write_pieces(pieces: Iterable[str], path: str | os.PathLike[str]) -> None:
    """Writes pieces of text one after the other; a file that is there is replaced when all are written.

    What is no regular file (`/dev/stdout`, a named pipe) is written to as it is.

    Raises:
        ModtraceError: it cannot be written; what was there before is there still.
    """
    try:
        if os.path.exists(path) and not os.path.isfile(path):
            _write(pieces, Path(path))
        else:
            _replace(pieces, Path(os.path.realpath(path)))  # where `path` is a link, it stays one
    except OSError as error:
        raise ModtraceError(
            f"{os.fspath(path)}: cannot be written: {error.strerror or error}. Give another path."
        ) from error


def _replace(pieces: Iterable[str], path: Path) -> None:
    beside = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    try:
        _write(pieces, beside)
        os.replace(beside, path)
    finally:
        beside.unlink(missing_ok=True)


def _write(pieces: Iterable[str], path: Path) -> None:
    with open(path, "w", encoding="utf-8", newline="\n") as file:
        file.writelines(pieces)
