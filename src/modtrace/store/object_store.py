"""Writes exports to object stores, which fsspec knows by the protocol of a URL."""

import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from ..errors import MissingLibraryError, ModtraceError, RecordingError
from ..optional import require
from .export import check_names
from .layout import is_url


def open_store(url: str, storage_options: Mapping[str, Any] | None = None) -> tuple[Any, str]:
    """Returns fsspec's file system for a URL or a local path, and the path within it.

    Raises:
        MissingLibraryError: fsspec, or the library of the URL's protocol, is not installed.
        ValueError: fsspec does not know the protocol.
    """
    core = require("fsspec.core", url)
    try:
        store, path = core.url_to_fs(url, **(storage_options or {}))
    except ImportError as error:  # fsspec names the library
        raise MissingLibraryError(f"{url}: {error}", name=error.name or "") from error
    return store, path.rstrip("/")


def size_of(path: Path | str) -> int:
    """Returns the size in bytes of a file, or of what is at a URL."""
    if not isinstance(path, str) or not is_url(path):
        return Path(path).stat().st_size
    store, within = open_store(path)
    return int(store.size(within))


@contextmanager
def store_errors(say: Callable[[str], RecordingError]) -> Iterator[None]:
    """Turns an error of a file system in the block, which may be of any class, into what `say` returns for its text."""
    try:
        yield
    except ModtraceError:
        raise
    except Exception as error:
        raise say(str(getattr(error, "strerror", None) or error).rstrip(".")) from error


@contextmanager
def uploaded(
    url: str, *, rank: str, last: str, known: Sequence[str], storage_options: Mapping[str, Any] | None
) -> Iterator[Path]:
    """Yields an empty folder on this machine. The files that the block writes there are then uploaded.

    Args:
        url: the folder of the export, which may have other files.
        rank: the folder of the rank within that of each table; other files in it are deleted.
        last: the file, relative to `url`, which shows that all others are complete: deleted first, uploaded last.
        known: the names at the top of such an export. A folder with other contents is not changed.
        storage_options: given to the file system.

    Raises:
        RecordingExistsError: something else is at `url`.
        RecordingError: it cannot be written.
    """

    def cannot_write(why: str) -> RecordingError:
        return RecordingError(
            f"{url}: cannot write the export here: {why}. Give another URL, or the options of its file system."
        )

    store, path = open_store(url, storage_options)
    with tempfile.TemporaryDirectory(prefix="modtrace-export-") as folder:
        with store_errors(cannot_write):
            if store.exists(path):
                names = [name.rstrip("/").rsplit("/", 1)[-1] for name in store.ls(path, detail=False)]
                check_names(url, names, known)
        yield Path(folder)
        with store_errors(cannot_write):
            files = [
                file.relative_to(folder).as_posix() for file in Path(folder).rglob("*") if file.is_file()
            ]
            if store.exists(f"{path}/{last}"):
                store.rm_file(f"{path}/{last}")
            kept = {f"{path}/{file}" for file in files}
            for table in known:
                there = f"{path}/{table}/{rank}"
                for old in set(store.find(there) if store.exists(there) else ()) - kept:
                    store.rm_file(old)
            for file in sorted(files, key=last.__eq__):
                store.makedirs(f"{path}/{file}".rsplit("/", 1)[0], exist_ok=True)
                store.put_file(f"{folder}/{file}", f"{path}/{file}")
