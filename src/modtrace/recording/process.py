"""Identifies processes: which of them wrote a file, and whether it still runs."""

import os
import platform
import time
from functools import cache
from pathlib import Path

# Positions behind the name of the program in /proc/PID/stat; the start is in ticks since the boot.
_STATE, _START = 0, 19
_ENDED = ("Z", "X")  # the state of a process that has ended, and for whose end its parent has not asked


def name_process(pid: int | None = None) -> str:
    """Returns a text that no other process has: host, namespace of pids, pid and moment of start.

    Args:
        pid: the process; None for this one.
    """
    pid = os.getpid() if pid is None else pid
    try:
        namespace = os.readlink("/proc/self/ns/pid")
    except OSError:
        namespace = ""
    return f"{platform.node().replace(' ', '')} {namespace} {pid} {_start_ticks(pid)}"


def is_running(name: str) -> bool | None:
    """Returns whether the process with a name still runs; None if that cannot be seen from here."""
    own, _, start = name_process().rpartition(" ")
    host, _, pid = name.rpartition(" ")[0].rpartition(" ")
    if not start or not pid.isdigit() or host != own.rpartition(" ")[0]:
        return None
    return name == f"{host} {pid} {_start_ticks(int(pid))}"


def process_start_ns(pid: int | None = None) -> int:
    """Returns the moment when a process started, in the terms of `time.time_ns()`.

    Where the system does not show it, it is the moment of the first call for that process.

    Args:
        pid: the process; None for this one.
    """
    return _start_ns(os.getpid() if pid is None else pid)


@cache
def _start_ns(pid: int) -> int:
    ticks = _start_ticks(pid)
    if not ticks:
        return time.time_ns()
    age_ns = time.clock_gettime_ns(time.CLOCK_BOOTTIME) - int(ticks) * 10**9 // os.sysconf("SC_CLK_TCK")
    return time.time_ns() - age_ns


def _start_ticks(pid: int) -> str:
    """Returns when a process started; "" if it does not run, or the system does not show it."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        return "" if fields[_STATE] in _ENDED else fields[_START]
    except (OSError, IndexError, UnicodeDecodeError):
        return ""
