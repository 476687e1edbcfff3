"""Identifies processes: which of them wrote a file, and whether it still runs."""

import os
import platform
import time
from functools import cache
from pathlib import Path

_STATE, _START = (
    0,
    19,
)  # their places behind the name of the program in /proc/PID/stat; the start is in ticks since the boot
_ENDED = ("Z", "X")  # the state of a process that has ended, and for whose end its parent has not asked


def name_process() -> str:
    """Returns a text that no other process has: host, namespace of pids, pid and moment of start."""
    return _name(os.getpid())


def name_parent() -> str:
    """Returns the text of the process that has started this one."""
    return _name(os.getppid())


def is_running(name: str) -> bool | None:
    """Returns whether the process with a name still runs; None if that cannot be seen from here."""
    here, _, start = _name(os.getpid()).rpartition(" ")
    place, _, pid = name.rpartition(" ")[0].rpartition(" ")
    if not start or not pid.isdigit() or place != here.rpartition(" ")[0]:
        return None
    return name == f"{place} {pid} {_start_ticks(int(pid))}"


def process_start_ns() -> int:
    """Returns the moment when this process started, in the terms of `time.time_ns()`.

    Where the system does not tell, it is the moment of the first call in this process.
    """
    return _start_ns(os.getpid())


def parent_start_ns() -> int:
    """Returns the moment when the process that has started this one started itself; see `process_start_ns`."""
    return _start_ns(os.getppid())


def _name(pid: int) -> str:
    try:
        namespace = os.readlink("/proc/self/ns/pid")
    except OSError:
        namespace = ""
    return f"{platform.node().replace(' ', '')} {namespace} {pid} {_start_ticks(pid)}"


@cache
def _start_ns(pid: int) -> int:
    ticks = _start_ticks(pid)
    if not ticks:
        return time.time_ns()
    age_ns = time.clock_gettime_ns(time.CLOCK_BOOTTIME) - int(ticks) * 10**9 // os.sysconf("SC_CLK_TCK")
    return time.time_ns() - age_ns


def _start_ticks(pid: int) -> str:
    """Returns when a process started; "" if it does not run, or the system does not tell."""
    try:
        found = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        return "" if found[_STATE] in _ENDED else found[_START]
    except (OSError, IndexError, UnicodeDecodeError):
        return ""
