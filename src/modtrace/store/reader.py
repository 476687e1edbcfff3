"""Reads a recording from its folder, complete or truncated anywhere, without torch."""

import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import pyarrow as pa
import pyarrow.compute as pc

from ..errors import (
    NotARecordingError,
    RecordingError,
    RecordingNotFoundError,
    RecordingReplacedError,
)
from ..recording.meta import RunMeta
from ..recording.protocols import RecordingData
from ..recording.raw_tensor import RawTensor
from ..recording.schema import schema, schemas
from .arrow_messages import Messages
from .collective_ring import with_newest
from .damage import no_header_yet, no_rank
from .json_files import StoredMeta, is_temporary_header, read_header, read_meta
from .layout import META, describe_content, is_rank_folder, rank_folders, table_file
from .read_stream import read_messages, read_table
from .read_tensors import TensorFiles
from .regular_file import FileState, file_state, folder_identity, reading


class FolderReader:
    """The `RecordingData` of a folder. A table is read and checked when it is first requested.

    A recording that is still being written may be read: tables and meta data are as of the time of the request. Tables
    of a closed recording are memory-mapped. If another run replaces the recording, nothing more is read, because parts
    of both would not make a recording.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        """Reads the two JSON files.

        Args:
            path: the recording, of which the first rank is read, or the folder of a rank in it.

        Raises:
            RecordingNotFoundError: nothing is at `path`.
            NotARecordingError: something else is at `path`.
            NewerSchemaError: a newer modtrace wrote it.
            DamagedRecordingError: its header cannot be understood, or no rank has written anything.
            RecordingError: it cannot be read.
        """
        self.path = Path(path)
        with reading(self.path):
            self._header, folder = _find(self.path)
            self.folder = folder.absolute()
            self._identity = folder_identity(self.folder)
            self._stored, self._meta_state = self._read_meta()
        self._tables: dict[str, tuple[FileState, pa.Table]] = {}
        self._messages: dict[str, tuple[FileState, Messages]] = {}
        self._tensors = TensorFiles(self.folder)
        self._are_tensors_held = False

    @property
    def meta(self) -> RunMeta:
        """The description of the run; its `marks` say what is missing.

        Raises:
            RecordingReplacedError: another run has replaced it.
            RecordingError: its file cannot be read any more.
        """
        self._check_is_same()
        meta, ended, damage, shards = self._stored
        if damage is not None:
            meta, marks = self._header, [f"{META} {damage}"]
        else:
            with reading(self.folder):  # the folder may be gone
                if ended is None:
                    marks = [self._not_closed(), *self._tensors.missing(None)]
                else:
                    of_tensors = (*self._tensors.missing(shards), *self._tensors.marks())
                    marks = [*self._cut_tables(ended), *of_tensors]
        return replace(meta, marks=(*meta.marks, *marks), complete=meta.complete and not marks)

    @property
    def is_closed(self) -> bool:
        """Whether the run has closed the recording; a run that is killed never does.

        Raises:
            RecordingReplacedError: another run has replaced it.
            RecordingError: its file cannot be read any more.
        """
        self._check_is_same()
        return self._stored.ended is not None

    def table(self, name: str) -> pa.Table:
        """Returns all rows of a table, in its schema.

        Raises:
            ValueError: there is no such table.
            RecordingReplacedError: another run has replaced the recording since it was opened.
            DamagedRecordingError: its file cannot be understood. A truncated file is read to its last complete batch.
            RecordingError: its file cannot be read.
        """
        table = self._read(name)
        is_killed = name == "collectives" and self._stored.ended is None
        return with_newest(table, self.folder) if is_killed else table

    def _read(self, name: str) -> pa.Table:
        wanted, file = schema(name), table_file(self.folder, name)
        self._check_is_same()
        is_final = name in (self._stored.ended or ())
        try:
            with reading(file, FileNotFoundError):
                state = file_state(file)
                if name not in self._tables or self._tables[name][0] != state:
                    table = read_table(file, name, is_final=is_final)
                    self._check_is_same()
                    self._tables[name] = state, table
        except FileNotFoundError:
            self._check_is_same()
            return pa.Table.from_batches([], schema=wanted)
        return self._tables[name][1]

    def tensor(self, blob: str) -> RawTensor:
        """Returns the whole tensor with a reference of `values.blob`. Its bytes are those of the file.

        Raises:
            RecordingError: the tensor or its file does not exist or cannot be read.
            DamagedRecordingError: its file is truncated, or cannot be understood.
        """
        if self._are_tensors_held:
            return self._tensors.get(blob)
        self._check_is_same()
        tensor = self._tensors.get(blob)
        self._check_is_same()
        return tensor

    def hold_tensors(self) -> None:
        """Opens all files of whole tensors, so that they stay readable here if the recording is deleted."""
        self._check_is_same()
        self._tensors.hold()
        self._are_tensors_held = True

    def _check_is_same(self) -> None:
        """Reads the meta data again, which do not change after closing, to check them.

        Raises:
            RecordingReplacedError: the path has another recording than the one that was opened.
        """
        with reading(self.folder):
            is_same = folder_identity(self.folder) == self._identity
            if is_same and (self._stored.ended is None or _state_of_meta(self.folder) != self._meta_state):
                stored, state = self._read_meta()
                is_same = _is_of_one_start(stored, self._stored)
                if is_same and self._stored.ended is None:
                    self._stored, self._meta_state = stored, state
        if not is_same:
            raise RecordingReplacedError(
                f"{self.path}: another run has replaced this recording since it was opened. "
                "Opening it again reads the new one."
            )

    def _read_meta(self) -> tuple[StoredMeta, FileState | None]:
        state = _state_of_meta(self.folder)  # first, so that changes made meanwhile are read the next time
        return read_meta(self.folder), state

    def _not_closed(self) -> str:
        try:
            last = pc.max(self.table("steps")["step"]).as_py()
        except RecordingError as error:
            return f"not closed: the process ended or is still running; its last step is unknown ({error})"
        if last is None:
            return "not closed: the process ended or is still running; no step is complete"
        return f"not closed: the process ended or is still running; complete to step {last}"

    def _cut_tables(self, ended: Iterable[str]) -> Iterator[str]:
        """Yields what is missing from a closed recording, which may have been copied only in part."""
        for name in (table for table in schemas() if table in ended):
            file = table_file(self.folder, name)
            try:
                with reading(file, FileNotFoundError):
                    state = file_state(file)
                    if name not in self._messages or self._messages[name][0] != state:
                        self._messages[name] = state, read_messages(file)
                messages = self._messages[name][1]
                if not messages.is_ended and messages.batches:
                    yield f"{file.name} is cut: the rows at its end are missing"
                elif not messages.is_ended:
                    yield f"{file.name} is cut: all of its rows are missing"
            except RecordingError as error:
                yield f"{file.name} cannot be read ({error})"
            except FileNotFoundError:
                yield f"{file.name} is missing"


def _state_of_meta(folder: Path) -> FileState | None:
    try:
        return file_state(folder / META)
    except FileNotFoundError:
        return None


def _is_of_one_start(a: StoredMeta, b: StoredMeta) -> bool:
    """Returns whether two states of `meta.json` may be of one recording, as the system reuses numbers of folders."""
    if a.damage is not None or b.damage is not None:
        return True
    return (a.meta.run_id, a.meta.clock_time_ns) == (b.meta.run_id, b.meta.clock_time_ns)


def _find(path: Path) -> tuple[RunMeta, Path]:
    """Returns the content of the header, and the folder of the rank that `path` selects."""
    if not path.exists():
        raise RecordingNotFoundError(f"{path}: nothing is there. Give the folder of a recording.")
    if not path.is_dir():
        if path.suffix == ".py":
            raise NotARecordingError(
                f"{path}: this is a script, and a recording is a folder. modtrace record {path} makes one of it."
            )
        raise NotARecordingError(
            f"{path}: not a recording: a file of {path.stat().st_size} bytes is there, and a recording is a "
            "folder with recording.json in it. Give the folder of a recording."
        )
    if is_rank_folder(path.absolute()):
        header = read_header(path.absolute().parent)
        if header is not None:
            return header, path
    header = read_header(path)
    if header is None and any(map(is_temporary_header, path.iterdir())):
        raise no_header_yet(path)
    if header is None:
        raise NotARecordingError(
            f"{path}: not a recording: there is no recording.json in this folder ({describe_content(path)}). "
            "Give the folder of a recording."
        )
    ranks = rank_folders(path)
    if not ranks:
        raise no_rank(path, content=describe_content(path))
    return header, ranks[0]


_UNNAMED = "unnamed"
_ATTEMPT = ".attempt-"


@dataclass(frozen=True, kw_only=True)
class RankOfRun:
    """A rank of a run. Ids in tables are unique within it."""

    run: str  # the run id; for an elastic restart with `.attempt-1` appended, as ids begin again
    rank: int

    @classmethod
    def of_meta(cls, meta: RunMeta) -> "RankOfRun":
        """Returns the rank that the meta data name. A run without an id is named `unnamed`."""
        return cls(run=meta.run_id or _UNNAMED, rank=meta.rank)


class RankData(NamedTuple):
    """A rank and its recording."""

    name: RankOfRun
    data: FolderReader


def open_ranks(reader: FolderReader) -> list[RankData]:
    """Returns all ranks of a reader's recording, or only the reader's own if its path is the rank's folder.

    Raises:
        RecordingError: one of them cannot be read.
    """
    if is_rank_folder(reader.path.absolute()):
        return [_named(reader)]
    with reading(reader.path):
        folders = rank_folders(reader.path)
    return [_named(FolderReader(folder)) for folder in folders]


def read_given(given: Any) -> RecordingData | None:
    """Returns the tables of what a user gives as a recording: a recording or the path of one; None for all else.

    Raises:
        ModtraceError: as `FolderReader` raises.
    """
    if isinstance(given, (str, os.PathLike)):
        return FolderReader(given)
    data: Any = getattr(given, "data", None)
    return data if hasattr(data, "table") else None


def open_last_attempts(path: str | os.PathLike[str]) -> list[tuple[int, FolderReader]]:
    """Returns the ranks of a recording in their order, with their numbers, as they ran after the last restart.

    A restart is of all ranks; one that has recorded nothing since is left out.

    Raises:
        ModtraceError: as `FolderReader` raises.
    """
    found = open_ranks(FolderReader(path))
    attempts = [int(rank.data.folder.name.partition(_ATTEMPT)[2] or 0) for rank in found]
    last = max(attempts, default=0)
    return [(rank.name.rank, rank.data) for rank, own in zip(found, attempts, strict=True) if own == last]


def _named(reader: FolderReader) -> RankData:
    """Returns a rank with the name of its folder, because damaged meta data have no rank."""
    rank, _, attempt = reader.folder.name.partition(_ATTEMPT)
    run = RankOfRun.of_meta(reader.meta).run + (f"{_ATTEMPT}{attempt}" if attempt else "")
    return RankData(RankOfRun(run=run, rank=int(rank.rpartition("-")[2])), reader)
