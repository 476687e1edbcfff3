"""Processes are told apart, and it is seen whether one still runs."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from itertools import chain, repeat

import pytest

from modtrace.recording.process import is_running, name_process, process_start_ns, read_clocks

NAME = "from modtrace.recording.process import name_process; print(name_process(), flush=True)"


def test_this_process_and_its_parent_run_under_different_names() -> None:
    assert name_process() == name_process() != name_process(os.getppid())
    assert is_running(name_process()) is is_running(name_process(os.getppid())) is True


def test_process_that_was_killed_does_not_run_before_and_after_its_parent_has_noticed() -> None:
    code = f"{NAME}; input()"
    with subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        name = process.stdout.readline().strip()
        assert is_running(name) is True
        process.send_signal(signal.SIGKILL)
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)  # a zombie still
        assert is_running(name) is False
    assert is_running(name) is False


def test_another_process_of_the_same_number_is_not_the_one() -> None:
    place, _, start = name_process().rpartition(" ")
    assert is_running(f"{place} {int(start) - 1}") is False


def test_process_on_another_machine_or_of_an_old_recording_is_not_known() -> None:
    assert is_running("elsewhere" + name_process()) is None
    assert is_running("") is None


def test_start_of_a_process_is_that_of_the_wall_clock() -> None:
    before_ns = time.time_ns()
    code = (
        "from modtrace.recording.process import process_start_ns as s; import os; print(s(), s(os.getppid()))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, check=True)
    started_ns, of_parent_ns = map(int, done.stdout.split())
    assert before_ns - 20_000_000 <= started_ns <= time.time_ns()
    assert abs(of_parent_ns - process_start_ns()) <= 20_000_000
    assert process_start_ns() < before_ns


def test_clocks_are_of_one_moment_though_a_thread_is_interrupted(monkeypatch: pytest.MonkeyPatch) -> None:
    now_ns = [0]

    def read(offset_ns: int, takes_ns: Iterator[int]) -> int:
        now_ns[0] += next(takes_ns)
        return now_ns[0] + offset_ns

    counter = chain((10, 10, 10, 7_000_000), repeat(10))
    wall = chain((5_000_000,), repeat(10))
    monkeypatch.setattr(time, "perf_counter_ns", lambda: read(0, counter))
    monkeypatch.setattr(time, "time_ns", lambda: read(10**18, wall))
    wall_ns, counter_ns = read_clocks()
    assert wall_ns - counter_ns == 10**18
