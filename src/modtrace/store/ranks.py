"""Finds all ranks of a recording, each with its name."""

from dataclasses import dataclass
from typing import NamedTuple

from ..recording.meta import RunMeta
from .layout import is_rank_folder, rank_folders
from .reader import FolderReader
from .regular_file import reading

_UNNAMED = "unnamed"
_ATTEMPT = ".attempt-"


@dataclass(frozen=True, kw_only=True)
class RankOfRun:
    """A rank of a run. Ids in tables are unique within it."""

    run: str  # the run id; that of an elastic restart ends in `.attempt-1`, for its ids begin again
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
    return [_named(FolderReader(each)) for each in folders]


def _named(reader: FolderReader) -> RankData:
    """Returns a rank with the name of its folder, because damaged meta data have no rank."""
    rank, _, attempt = reader.folder.name.partition(_ATTEMPT)
    run = RankOfRun.of_meta(reader.meta).run + (f"{_ATTEMPT}{attempt}" if attempt else "")
    return RankData(RankOfRun(run=run, rank=int(rank.rpartition("-")[2])), reader)
