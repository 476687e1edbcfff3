"""Names the files and folders of a recording."""

import re
from collections.abc import Iterable
from pathlib import Path
from typing import TypeGuard

#: The file with what is the same for all ranks, which makes a folder a recording.
HEADER = "recording.json"
META = "meta.json"

#: The file of a rank with its newest collectives, until the recording is closed.
RING = "collectives.ring"

#: A file that exists in a folder while a process starts to write there.
STARTING = ".starting"

_RANK_FOLDER = re.compile(r"rank-\d{5}(\.attempt-\d+)?")


def rank_folder(path: Path, rank: int, attempt: int = 0) -> Path:
    """Returns the folder of a rank; `attempt` is the number of its restart."""
    return path / (f"rank-{rank:05d}" + (f".attempt-{attempt}" if attempt else ""))


def rank_folders(path: Path) -> list[Path]:
    """Returns the existing folders of ranks, by rank and then by attempt."""
    folders = [folder for folder in path.iterdir() if is_rank_folder(folder)]
    return sorted(folders, key=lambda folder: (folder.name[:10], len(folder.name), folder.name))


def is_rank_folder(path: Path) -> bool:
    """Returns whether a name is that of a rank's folder."""
    return _RANK_FOLDER.fullmatch(path.name) is not None


def rank_of(folder: Path) -> int:
    """Returns the rank that a folder of a rank is named after."""
    return int(folder.name[5:10])


def table_file(folder: Path, table: str) -> Path:
    """Returns the file of a table in a rank's folder."""
    return folder / f"{table}.arrow"


def describe_content(path: Path) -> str:
    """Returns a text on the contents of a folder: `it holds 'a', 'b', 'c' and 2 more`, or `it is empty`."""
    return describe_names(entry.name for entry in path.iterdir() if entry.name != STARTING)


def describe_names(names: Iterable[str]) -> str:
    """Returns the same text for the names in a folder."""
    names = sorted(names)
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return f"it holds {', '.join(map(repr, names[:3]))}{more}" if names else "it is empty"


def is_url(path: object) -> TypeGuard[str]:
    """Returns whether a path names a place on an object store (`s3://bucket/runs`), and no local one."""
    return isinstance(path, str) and "://" in path
