"""Writes the files of an export beside its folder and moves them in at the end, so that a failure changes nothing."""

import os
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from ..errors import RecordingError, RecordingExistsError, system_errors
from .layout import describe_content


@contextmanager
def staged(path: Path, *, name: str, last: Path, known: Sequence[str]) -> Iterator[Path]:
    """Yields an empty folder. The files that the block writes there are moved to the same positions in `path`.

    Args:
        path: the folder of the export, which is made if it is missing. Other files in it stay.
        name: distinguishes this export from others that may be written to the same folder.
        last: the file, relative to `path`, which shows that all others are complete. An older one is deleted before
            the first of the others is replaced, and the new one is moved last.
        known: the names at the top of such an export. A folder with other contents is not changed.

    Raises:
        RecordingExistsError: something else is at `path`.
        RecordingError: it cannot be written.
    """

    def say(error: OSError) -> RecordingError:
        why = error.strerror or error
        return RecordingError(f"{path}: cannot write the export here: {why}. Give another path.")

    with system_errors(say):
        _check(path, known)
        is_new = not path.exists()
        path.mkdir(parents=True, exist_ok=True)
        staging = path / f".{name}.tmp"
        try:
            shutil.rmtree(staging, ignore_errors=True)  # of an export that was killed
            staging.mkdir()
            yield staging
            _put_in_place(staging, path, last)
        finally:
            shutil.rmtree(staging, ignore_errors=True)
            if is_new:
                with suppress(OSError):  # not empty: what was to come is there
                    path.rmdir()


def _check(path: Path, known: Sequence[str]) -> None:
    if not path.exists():
        return
    if not path.is_dir():
        raise RecordingExistsError(
            f"{path}: a file is here already, and the export is a folder. Give another path."
        )
    seen = {each.name for each in path.iterdir() if not each.name.startswith(".")}
    if seen and known[-1] not in seen and not seen <= set(known):
        raise RecordingExistsError(
            f"{path}: a folder that is no export is here already ({describe_content(path)}). "
            "Give another path."
        )


def _put_in_place(staging: Path, path: Path, last: Path) -> None:
    files = [each.relative_to(staging) for each in sorted(staging.rglob("*")) if each.is_file()]
    for file in files:
        (path / file).parent.mkdir(parents=True, exist_ok=True)
    (path / last).unlink(missing_ok=True)
    for file in sorted(files, key=last.__eq__):
        os.replace(staging / file, path / file)
