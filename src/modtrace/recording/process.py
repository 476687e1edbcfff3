"""Identifies processes: which of them wrote a file, and whether it still runs. Has the collector of this one wait."""

import gc
import os
import platform
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path

# Positions after the program's name in /proc/PID/stat; the start is given in ticks since boot.
_STATE, _START = 0, 19
#: A thread may be interrupted for milliseconds between two readings of clocks, and rarely several times in turn.
_READINGS = 3
_ENDED = ("Z", "X")  # the states of a process that has ended without its parent knowing yet


def name_process(pid: int | None = None) -> str:
    """Returns a text that is unique to a process: host, namespace of pids, pid and start time.

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
    """Returns whether the process with this name still runs; None if it cannot be seen from here."""
    own, _, start = name_process().rpartition(" ")
    host, _, pid = name.rpartition(" ")[0].rpartition(" ")
    if not start or not pid.isdigit() or host != own.rpartition(" ")[0]:
        return None
    return name == f"{host} {pid} {_start_ticks(int(pid))}"


def read_clocks() -> tuple[int, int]:
    """Returns `time.time_ns()` and `time.perf_counter_ns()` of one moment: of several readings the shortest."""
    readings = []
    for _ in range(_READINGS):
        before_ns, wall_ns, after_ns = time.perf_counter_ns(), time.time_ns(), time.perf_counter_ns()
        readings.append((after_ns - before_ns, wall_ns, (before_ns + after_ns) // 2))
    _, wall_ns, counter_ns = min(readings)
    return wall_ns, counter_ns


def process_start_ns(pid: int | None = None) -> int:
    """Returns the start time of a process, as `time.time_ns()` counts.

    If the system does not show it, the time of the first call for that process is returned.

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
    """Returns the start of a process in ticks; "" if it does not run, or if the system does not show it."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        return "" if fields[_STATE] in _ENDED else fields[_START]
    except (OSError, IndexError, UnicodeDecodeError):
        return ""


@contextmanager
def collector_paused() -> Iterator[None]:
    """Lets Python's garbage collector wait in a block that makes many objects, none of which can be garbage.

    Counted as they come, they would have it visit all that lives again and again.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
