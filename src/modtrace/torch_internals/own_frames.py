"""Takes modtrace's frames out of the tracebacks that a program sees."""

import os
from pathlib import Path
from types import TracebackType

_OURS = str(Path(__file__).parent.parent) + os.sep


def is_ours(trace: TracebackType) -> bool:
    """Returns whether an entry of a traceback is of a function of modtrace."""
    return trace.tb_frame.f_code.co_filename.startswith(_OURS)


def leave_out_own_frames(error: BaseException) -> None:
    """Drops modtrace's outermost frames from the traceback of an error that the caller has caught.

    The caller raises it on by a bare `raise`, which since Python 3.11 takes the traceback from the error and adds no
    entry for its frame; before, nothing changes. An error of modtrace's own keeps its frames.
    """
    trace = error.__traceback__
    while trace is not None and is_ours(trace):
        trace = trace.tb_next
    if trace is not None:
        error.__traceback__ = trace
