"""Distinguishes a recording that other ranks of this run are making from one left by an earlier run."""

import contextlib
from pathlib import Path

from ..errors import RecordingError
from ..recording.meta import RunMeta
from ..recording.process import is_running, name_process, process_start_ns
from .json_files import read_meta
from .layout import rank_folders, rank_of

#: The time for which a rank waits for others: torch's limit with gloo; the limit with NCCL is 10 minutes.
_PATIENCE_NS = 30 * 60 * 10**9


def is_of_same_run(path: Path, header: RunMeta, meta: RunMeta, *, is_restart: bool = False) -> bool:
    """Returns whether the recording in `path` is of the run that `meta` describes.

    A run id belongs to one run only, but a second run may have the same launch name: the address at which ranks meet,
    or the id that the user gave. The ranks of a run exist at the same time, because none gets past the start of the
    others, so a recording whose ranks had all ended before this process began is of an earlier run.

    Args:
        path: the recording.
        header: the content of its header.
        meta: the description of the run that is about to write.
        is_restart: whether the ranks were restarted, so that those before have ended.
    """
    has_equal_id = header.run_id == meta.run_id != ""
    folders = rank_folders(path)
    if not meta.launch or meta.process != name_process():  # otherwise the meta data are a copy
        return has_equal_id
    if header.launch != meta.launch:  # the launch of the parent process, or of another user
        return any(_writer_of(folder) == meta.launch and may_be_current(folder) for folder in folders)
    is_new = all(rank_of(folder) != meta.rank for folder in folders)
    is_restart |= meta.attempt > 0
    if not folders or (has_equal_id and (is_new or is_restart)):
        return True
    return any(may_be_current(folder, is_restart=is_restart) for folder in folders)


def may_be_current(folder: Path, *, is_restart: bool = False) -> bool:
    """Returns whether a rank's folder is of a run that was active when this process began.

    Args:
        folder: the folder of a rank.
        is_restart: whether the ranks were restarted, so that those before have ended.
    """
    written_ns, began_ns = _written_ns(folder), process_start_ns()
    if written_ns >= began_ns:
        return True
    try:
        stored = read_meta(folder)
    except RecordingError:
        return False
    is_seen_running = is_running(stored.meta.process)
    if is_restart or (stored.ended is None and is_seen_running is None):  # the writer is on another machine
        return written_ns >= began_ns - _PATIENCE_NS
    return stored.ended is None and is_seen_running is True


def is_restarted(path: Path, meta: RunMeta, agent_start_ns: int) -> bool:
    """Returns whether ended processes of this launch, under the same agent, have written to the recording.

    Torchrun's count of restarts does not show this: it stays the same when machines come or go, and each machine counts
    only the failures of its own ranks.

    Args:
        path: the recording.
        meta: the description of the run that is about to write.
        agent_start_ns: the start time of the torchrun process that started this one.
    """
    for folder in rank_folders(path):
        with contextlib.suppress(RecordingError):
            stored = read_meta(folder).meta
            is_earlier = stored.launch == meta.launch != "" and stored.process != meta.process
            if is_earlier and _written_ns(folder) >= agent_start_ns and is_running(stored.process) is False:
                return True
    return False


def is_anothers(folder: Path, meta: RunMeta) -> bool:
    """Returns whether another process of this launch is writing to the folder of this rank."""
    if not meta.launch or meta.process != name_process():
        return False
    writer = _writer_of(folder)
    return writer != meta.process and (
        _written_ns(folder) >= process_start_ns() or (may_be_current(folder) and is_running(writer) is True)
    )


def _written_ns(folder: Path) -> int:
    """Returns when a file in a folder was last written, or the folder was made."""
    written_ns = 0
    with contextlib.suppress(OSError):
        for file in (folder, *folder.iterdir()):
            with contextlib.suppress(FileNotFoundError):  # its writer has replaced the file
                written_ns = max(written_ns, file.stat().st_mtime_ns)
    return written_ns


def _writer_of(folder: Path) -> str:
    try:
        return read_meta(folder).meta.process
    except RecordingError:
        return ""
