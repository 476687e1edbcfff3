"""Writes exports: which tables they have, and how their files reach a folder without leaving half of them there."""

import json
import os
import shutil
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pyarrow as pa

from ..errors import RecordingError, RecordingExistsError, system_errors
from ..recording.arrow.arrays import from_numpy, last_of_each, to_numpy
from ..recording.meta import RunMeta
from ..recording.protocols import RecordingData
from ..recording.schema import schemas
from .layout import describe_names

#: The table of the run, which is written last: a row in it shows that the other tables are complete.
RUNS = "runs"

_MOST_ROWS = 131_072
_MOST_BYTES = 64 * 2**20  # limits the memory if rows contain long lists
_FEWEST_ROWS = 1024

RUNS_SCHEMA = pa.schema(
    {
        **dict.fromkeys(("run_id", "created", "modtrace_version"), pa.string()),
        "argv": pa.list_(pa.string()),
        **dict.fromkeys(("versions", "device", "git_commit", "options"), pa.string()),
        **dict.fromkeys(("world_size", "clock_time_ns", "clock_perf_counter_ns"), pa.int64()),
        "marks": pa.list_(pa.string()),
        "complete": pa.bool_(),
        "flags": pa.string(),
    }
)


def export_names() -> tuple[str, ...]:
    """Returns the names of all tables of an export, `RUNS` last."""
    return (*schemas(), RUNS)


def export_tables(data: RecordingData) -> Iterator[tuple[str, pa.Table]]:
    """Yields all tables in the order of `export_names`. `modules` has each module once."""
    for name in schemas():
        table = data.table(name)
        if name == "modules":  # names may be learnt late, so the last row of a module counts
            table = table.take(from_numpy(last_of_each(to_numpy(table["module_id"]))))
        yield name, table
    yield RUNS, _run_row(data.meta)


def slices(table: pa.Table) -> Iterator[pa.Table]:
    """Yields the rows in pieces of limited size; a single empty piece if there are no rows."""
    if not table.num_rows:
        yield table
    for start in range(0, table.num_rows, _MOST_ROWS):
        piece = table.slice(start, _MOST_ROWS)
        rows = max(_FEWEST_ROWS, piece.num_rows * _MOST_BYTES // max(piece.nbytes, _MOST_BYTES))
        for at in range(0, piece.num_rows, rows):
            yield piece.slice(at, rows)


def _run_row(meta: RunMeta) -> pa.Table:
    values: dict[str, Any] = meta.to_json()
    texts = [name for name in ("versions", "options", "flags") if values[name] is not None]
    values |= {name: json.dumps(dict(values[name]), default=str) for name in texts}
    return pa.Table.from_pylist([{name: values[name] for name in RUNS_SCHEMA.names}], schema=RUNS_SCHEMA)


@contextmanager
def staged(
    path: Path, *, name: str, last: Path, known: Sequence[str], old: str | None = None
) -> Iterator[Path]:
    """Yields an empty folder. The files that the block writes there are moved to the same positions in `path`.

    Args:
        path: the folder of the export, which is made if it is missing. Other files in it stay.
        name: distinguishes this export from others that may be written to the same folder.
        last: the file, relative to `path`, which shows that all others are complete. An older one is deleted before
            the first of the others is replaced, and the new one is moved last.
        known: the names at the top of such an export. A folder with other contents is not changed.
        old: a glob of files in `path`; those of them that the block does not write are deleted.

    Raises:
        RecordingExistsError: something else is at `path`.
        RecordingError: it cannot be written.
    """

    def cannot_write(error: OSError) -> RecordingError:
        why = error.strerror or error
        return RecordingError(f"{path}: cannot write the export here: {why}. Give another path.")

    with system_errors(cannot_write):
        _check(path, known)
        is_new = not path.exists()
        path.mkdir(parents=True, exist_ok=True)
        staging = path / f".{name}.tmp"
        try:
            shutil.rmtree(staging, ignore_errors=True)  # left by an export that was killed
            staging.mkdir()
            yield staging
            _move_in(staging, path, last, () if old is None else path.glob(old))
        finally:
            shutil.rmtree(staging, ignore_errors=True)
            if is_new:
                with suppress(OSError):  # not empty: the new files are there
                    path.rmdir()


def _check(path: Path, known: Sequence[str]) -> None:
    if not path.exists():
        return
    if not path.is_dir():
        raise RecordingExistsError(
            f"{path}: a file is here already, and the export is a folder. Give another path."
        )
    check_names(path, {entry.name for entry in path.iterdir()}, known)


def check_names(path: Path | str, names: Collection[str], known: Sequence[str]) -> None:
    """Checks the names at the top of a folder to which an export with the names `known` is written.

    Raises:
        RecordingExistsError: it is a folder of something else.
    """
    names = {name for name in names if not name.startswith(".")}
    if names and known[-1] not in names and not names <= set(known):
        raise RecordingExistsError(
            f"{path}: a folder that is no export is here already ({describe_names(names)}). Give another path."
        )


def _move_in(staging: Path, path: Path, last: Path, old: Iterable[Path]) -> None:
    files = [file.relative_to(staging) for file in sorted(staging.rglob("*")) if file.is_file()]
    for file in files:
        (path / file).parent.mkdir(parents=True, exist_ok=True)
    (path / last).unlink(missing_ok=True)
    for file in set(old) - {path / file for file in files}:
        file.unlink(missing_ok=True)
        with suppress(OSError):  # not empty
            file.parent.rmdir()
    for file in sorted(files, key=last.__eq__):
        os.replace(staging / file, path / file)
