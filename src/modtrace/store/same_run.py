"""Tells a recording that other ranks of this run are making from one that an earlier run has left."""

import contextlib
from pathlib import Path

from ..errors import RecordingError
from ..recording.meta import RunMeta
from ..recording.process import is_running, name_process, process_start_ns
from .json_files import read_meta
from .layout import rank_folders, rank_of

#: So long a rank waits for the others: torch's own limit with gloo, that with NCCL is 10 minutes.
_PATIENCE_NS = 30 * 60 * 10**9


def is_of_same_run(path: Path, header: RunMeta, meta: RunMeta, *, is_restart: bool = False) -> bool:
    """Returns whether the recording in `path` is of the run that `meta` describes.

    An id is equal in one run only, but a second run may have the name of the launch: the address at which the ranks
    meet, or the id that the user gave. Ranks of one run exist at the same time, because none gets past the start
    of the others: so a recording whose ranks had all ended before this process began is of an earlier run.

    Args:
        path: the recording.
        header: what its header says.
        meta: the description of the run that is about to write.
        is_restart: the ranks have been restarted, so that those before have ended.
    """
    has_equal_id = header.run_id == meta.run_id != ""
    folders = rank_folders(path)
    if not meta.launch or meta.process != name_process():  # the second is a copy
        return has_equal_id
    if header.launch != meta.launch:  # that of the process that has started this one, or of somebody else
        return any(_writer_of(folder) == meta.launch and may_be_current(folder) for folder in folders)
    is_new = all(rank_of(folder) != meta.rank for folder in folders)
    is_restart |= meta.attempt > 0
    if not folders or (has_equal_id and (is_new or is_restart)):
        return True
    return any(may_be_current(folder, is_restart=is_restart) for folder in folders)


def may_be_current(folder: Path, *, is_restart: bool = False) -> bool:
    """Returns whether a rank's folder is of a run that was going on when this process began.

    Args:
        folder: the folder of a rank.
        is_restart: the ranks have been restarted, so that those before have ended.
    """
    written_ns, began_ns = _written_ns(folder), process_start_ns()
    if written_ns >= began_ns:
        return True
    try:
        stored = read_meta(folder)
    except RecordingError:
        return False
    is_seen_running = is_running(stored.meta.process)
    if is_restart or (stored.ended is None and is_seen_running is None):  # it is on another machine
        return written_ns >= began_ns - _PATIENCE_NS
    return stored.ended is None and is_seen_running is True


def is_restarted(path: Path, meta: RunMeta, agent_start_ns: int) -> bool:
    """Returns whether other processes of this launch, which have ended, wrote to a recording under the same agent.

    Torchrun's count of restarts does not tell: it stays where machines have come or gone, and each machine counts the
    failures of its own ranks.

    Args:
        path: the recording.
        meta: the description of the run that is about to write.
        agent_start_ns: when the process of torchrun that has started this one was started itself.
    """
    for folder in rank_folders(path):
        with contextlib.suppress(RecordingError):
            stored = read_meta(folder).meta
            is_earlier = stored.launch == meta.launch != "" and stored.process != meta.process
            if is_earlier and _written_ns(folder) >= agent_start_ns and is_running(stored.process) is False:
                return True
    return False


def is_anothers(folder: Path, meta: RunMeta) -> bool:
    """Returns whether another process of this launch writes to the folder of the rank that `meta` describes."""
    if not meta.launch or meta.process != name_process():
        return False
    writer = _writer_of(folder)
    return writer != meta.process and (
        _written_ns(folder) >= process_start_ns() or (may_be_current(folder) and is_running(writer) is True)
    )


def _written_ns(folder: Path) -> int:
    """Returns when a file was last written in a folder, or made."""
    written_ns = 0
    with contextlib.suppress(OSError):
        for file in (folder, *folder.iterdir()):
            with contextlib.suppress(FileNotFoundError):  # its writer has replaced it
                written_ns = max(written_ns, file.stat().st_mtime_ns)
    return written_ns


def _writer_of(folder: Path) -> str:
    try:
        return read_meta(folder).meta.process
    except RecordingError:
        return ""
