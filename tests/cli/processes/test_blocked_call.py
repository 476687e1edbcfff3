"""A signal ends a recorded program also while a call does not come back to Python."""

import signal
from collections.abc import Mapping
from pathlib import Path

import pytest

import modtrace
from helpers.command_ends import (
    EndAfterSignal,
    Signalled,
    end_of_modtrace,
    ends_after_signals,
    write_program,
)

INT, TERM, HUP = signal.SIGINT, signal.SIGTERM, signal.SIGHUP

#: Trains five steps. `block` and `hold` wait in C for a number of seconds, without and with Python's interpreter lock.
BEGIN = """
import asyncio, collections, ctypes, hashlib, itertools, os, re, signal, socket, sys, threading, time
import torch
import torch.distributed as dist
from torch import nn

model = nn.Sequential(nn.Linear(4, 4), nn.ReLU())
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(5):
    optimizer.zero_grad()
    model(torch.ones(2, 4)).sum().backward()
    optimizer.step()

def wait_in(library, seconds):
    mutex, ends_s = ctypes.create_string_buffer(64), time.time() + seconds
    library.pthread_mutex_lock(mutex)
    library.pthread_mutex_timedlock(mutex, (ctypes.c_long * 2)(int(ends_s), int(ends_s % 1 * 1e9)))

def block(seconds=60):
    wait_in(ctypes.CDLL(None), seconds)

def hold(seconds=60):
    wait_in(ctypes.PyDLL(None), seconds)

def ready(seconds=0.3):
    time.sleep(seconds)
    print("ready", flush=True)

def join(rank, address):
    dist.init_process_group("gloo", init_method=address, rank=rank, world_size=2)

def join_with_a_peer():
    address, parent = f"file://{os.path.abspath(sys.argv[0])}.store", os.getpid()
    if not os.fork():
        join(1, address)
        while os.getppid() == parent:
            time.sleep(0.1)
        os._exit(0)
    join(0, address)

class Reduce(nn.Module):
    def forward(self, x):
        dist.all_reduce(x)
        return x

"""

FREE = {
    "waits_for_ranks_at_a_file": "ready()\njoin(0, f'file://{os.path.abspath(sys.argv[0])}.store')",
    "waits_for_ranks_at_a_port": "with socket.create_server(('127.0.0.1', 0)) as server:\n"
    "    port = server.getsockname()[1]\n"
    "ready()\njoin(0, f'tcp://127.0.0.1:{port}')",
    "barrier": "join_with_a_peer()\nready()\ndist.barrier()",
    "collective_in_a_module": "join_with_a_peer()\nready()\nnn.Sequential(model, Reduce())(torch.ones(2, 4))",
    "lock": "lock = threading.Lock()\nlock.acquire()\nready()\nlock.acquire()",
    "call_in_c": "ready()\nblock()",
    "regular_expression": "ready()\nre.match('(a+)+b', 'a' * 60)",  # it looks for signals while it holds the lock
}
HOLDING = {
    "blocked": "ready(1)\nhold()",
    "computing": "ready(1)\ncollections.deque(itertools.repeat(None, 10**12), maxlen=0)",
}

MARKS = {INT: "KeyboardInterrupt", TERM: "Terminated: SIGTERM", HUP: "Terminated: SIGHUP"}


def run_all(
    folder: Path, programs: Mapping[str, tuple[str, list[tuple[int, float]]]], *options: str
) -> dict[str, EndAfterSignal]:
    """Returns how each program ends, a body and the signals that it is sent with the seconds before each."""
    for name, (body, _) in programs.items():
        write_program(folder, name, BEGIN + body + "\n")
    return ends_after_signals(
        folder,
        {name: Signalled(["record", *options, f"{name}.py"], sent) for name, (_, sent) in programs.items()},
    )


def marks_of(folder: Path, name: str) -> tuple[str, ...]:
    return modtrace.open_recording(folder / f"{name}.modtrace").meta.marks


@pytest.mark.parametrize(
    ("number", "names", "options"),
    [
        (TERM, tuple(FREE), ()),
        (INT, ("barrier", "call_in_c", "regular_expression"), ()),
        (TERM, ("collective_in_a_module",), ("--ops",)),
        pytest.param(HUP, tuple(FREE), (), marks=pytest.mark.soak),
    ],
)
def test_signal_ends_a_blocked_program_within_two_seconds_and_closes_the_recording(
    tmp_path: Path, number: signal.Signals, names: tuple[str, ...], options: tuple[str, ...]
) -> None:
    bodies = {name: FREE[name] for name in names}
    ends = run_all(tmp_path, {name: (body, [(number, 0.2)]) for name, body in bodies.items()}, *options)
    assert {name: end.status for name, end in ends.items()} == dict.fromkeys(bodies, -number)
    assert max(end.after_s for end in ends.values()) < 2
    for name, end in ends.items():
        steps = 6 if name == "collective_in_a_module" else 5
        mark = f"the run ended by {MARKS[number]}; step {steps - 2} was the last to end"
        assert marks_of(tmp_path, name) == (mark,)
        assert modtrace.open_recording(tmp_path / f"{name}.modtrace").table("steps").num_rows == steps
        assert end.stderr.count("modtrace: recorded ") == 1
        assert end.stderr.endswith(f"; {mark}. Look at it with: modtrace show {name}.modtrace\n")
        assert "warning" not in end.stderr


@pytest.mark.parametrize("number", [TERM, INT, pytest.param(HUP, marks=pytest.mark.soak)])
def test_signal_ends_a_call_that_holds_the_interpreter_lock_and_leaves_a_readable_recording(
    tmp_path: Path, number: signal.Signals
) -> None:
    ends = run_all(tmp_path, {name: (body, [(number, 0.2)]) for name, body in HOLDING.items()})
    assert {name: end.status for name, end in ends.items()} == dict.fromkeys(HOLDING, -number)
    assert max(end.after_s for end in ends.values()) < 2
    for name in HOLDING:
        assert marks_of(tmp_path, name) == (
            "not closed: the process ended or is still running; complete to step 3",
        )
        assert modtrace.open_recording(tmp_path / f"{name}.modtrace").table("steps").num_rows == 4


#: Programs that Python acts on signals in, with what they are sent, the status and the output after "ready". They say
#: "ready" where they can take a signal: at the end of that call they may be held up for longer than a signal waits.
IN_PYTHON = {
    "comes_back_in_time": (
        "try:\n    ready()\n    block(0.8)\nfinally:\n    print('finally')\n    hold(2)\n    print('all of it')",
        [(TERM, 0.5)],
        (-TERM, "finally\nall of it\n"),
    ),
    "holds_the_lock_in_finally": (
        "try:\n    ready()\n    while True: time.time()\nfinally:\n    hold(2)\n    print('finally')",
        [(TERM, 0.5)],
        (-TERM, "finally\n"),
    ),
    "interrupt_of_a_long_computation_is_caught": (
        "try:\n    ready()\n    hashlib.pbkdf2_hmac('sha256', b'', b'', 4_000_000)\n"
        "except KeyboardInterrupt:\n    print('saved')",
        [(INT, 0.5)],
        (0, "saved\n"),
    ),
    "interrupt_is_caught_and_the_program_goes_on_to_block": (
        "try:\n    ready()\n    time.sleep(9)\nexcept KeyboardInterrupt:\n    block(2.5)\nprint('went on')",
        [(INT, 0.5)],
        (0, "went on\n"),
    ),
    "a_fork_lives_on": (  # until the functions that `atexit` calls, as that of a pool of processes
        "import multiprocessing\npool = multiprocessing.get_context('fork').Pool(1)\nready()\nprint('end')",
        [],
        (0, "end\n"),
    ),
    "handler_of_its_own": (
        "signal.signal(signal.SIGTERM, lambda *_: print('handled'))\nready()\nblock(3)\nhold(2)",
        [(TERM, 0.5), (TERM, 2.5)],
        (0, "handled\nhandled\n"),
    ),
    "handler_of_its_own_for_interrupts": (
        "signal.signal(signal.SIGINT, lambda *_: print('handled'))\nready()\nhold(2)",
        [(INT, 0.5)],
        (0, "handled\n"),
    ),
    "ignored": (
        "signal.signal(signal.SIGTERM, signal.SIG_IGN)\nready()\nhold(2)\nprint('went on')",
        [(TERM, 0.5)],
        (0, "went on\n"),
    ),
    "default": (
        "signal.signal(signal.SIGTERM, signal.SIG_DFL)\nready()\nblock(3)\nprint('went on')",
        [(TERM, 0.5)],
        (-TERM, ""),
    ),
    "asyncio": (
        "async def main():\n"
        "    stop = asyncio.Event()\n"
        "    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stop.set)\n"
        "    ready()\n"
        "    await stop.wait()\n"
        "    print('stopped')\n"
        "asyncio.run(main())",
        [(TERM, 0.5)],
        (0, "stopped\n"),
    ),
    "interrupt_of_asyncio": (
        "async def main():\n"
        "    try:\n"
        "        ready()\n"
        "        await asyncio.sleep(9)\n"
        "    except asyncio.CancelledError:\n"
        "        print('cancelled')\n"
        "        raise\n"
        "asyncio.run(main())",
        [(INT, 0.5)],
        (-INT, "cancelled\n"),
    ),
    "what_a_program_sees": (
        "print(signal.set_wakeup_fd(-1), signal.getsignal(signal.SIGINT) is signal.default_int_handler)\n"
        "ready()\ntime.sleep(9)",
        [(TERM, 0.5)],
        (-TERM, ""),
    ),
    "fork": (
        "child = os.fork()\n"
        "if not child:\n    block()\n"
        "time.sleep(0.2)\nos.kill(child, signal.SIGTERM)\nprint(os.waitpid(child, 0)[1])\nready(0)\ntime.sleep(9)",
        [(TERM, 0.5)],
        (-TERM, ""),
    ),
}


def test_where_python_code_runs_all_is_as_without_the_watch(tmp_path: Path) -> None:
    programs = {name: (body, sent) for name, (body, sent, _) in IN_PYTHON.items()}
    ends = run_all(tmp_path, programs, "-q")
    said = {name: (end.status, end.stdout.partition("ready\n")[2]) for name, end in ends.items()}
    assert said == {name: expected for name, (_, _, expected) in IN_PYTHON.items()}
    assert ends["what_a_program_sees"].stdout == "-1 True\nready\n"
    assert ends["fork"].stdout == f"{int(TERM)}\nready\n"
    assert {name: end.stderr for name, end in ends.items() if "modtrace" in end.stderr} == {}
    assert all(
        "not closed" not in mark for name in ends if name != "default" for mark in marks_of(tmp_path, name)
    )


GET_RECORDER = (
    "import gc\nfrom modtrace.collect.recorder.recorder import Recorder\n"
    "recorder = next(each for each in gc.get_objects() if type(each) is Recorder and each._active)\n"
)

#: Programs that the watch ends, what they are sent, and the bounds of the seconds after the last signal.
ENDED = {
    "handler_put_back": (
        "signal.signal(signal.SIGTERM, signal.signal(signal.SIGTERM, print))\nready(0.7)\nblock()",
        [(TERM, 0.2)],
        (0.4, 2),
    ),
    "after_a_fork": (
        "if not os.fork(): os._exit(0)\nos.wait()\nprint('ready', flush=True)\nblock()",
        [(TERM, 0.05)],
        (0.4, 2),
    ),
    "second_signal": ("ready()\nblock()", [(TERM, 0.2), (TERM, 0.2)], (0, 0.4)),
    "second_interrupt": ("ready()\nhold()", [(INT, 0.2), (INT, 0.2)], (0, 0.4)),
    "second_interrupt_of_a_computation": (
        "ready()\nhashlib.pbkdf2_hmac('sha256', b'', b'', 10**9)",
        [(INT, 0.2), (INT, 1.8)],
        (0, 0.4),
    ),
    "same_signal_twice_at_once": ("ready()\nblock()", [(TERM, 0.2), (TERM, 0)], (0.4, 2)),
    "other_signal": ("ready()\nblock()", [(INT, 0.2), (TERM, 0.1)], (0.3, 2)),
    "lock_of_the_recording_is_held": (
        GET_RECORDER + "ready()\nwith recorder._lock:\n    block()",
        [(TERM, 0.2)],
        (1.4, 2),
    ),
    "second_signal_while_the_recording_is_closed": (
        GET_RECORDER + "ready()\nwith recorder._lock:\n    block()",
        [(TERM, 0.2), (TERM, 0.9)],
        (0, 0.4),
    ),
    "second_in_finally": (
        "try:\n    ready()\n    time.sleep(9)\nfinally:\n    block()",
        [(TERM, 0.5), (TERM, 0.3)],
        (0.4, 2),
    ),
    "blocked_in_output": (
        "ready()\nread, write = os.pipe()\nos.dup2(write, 1)\nprint('x' * 10**6, flush=True)",
        [(TERM, 0.2)],
        (0, 2),
    ),
}


def test_watch_ends_the_program_once_and_in_time(tmp_path: Path) -> None:
    programs = {name: (body, sent) for name, (body, sent, _) in ENDED.items()}
    ends = run_all(tmp_path, programs)
    for name, (_, sent, (least_s, most_s)) in ENDED.items():
        end = ends[name]
        assert -end.status in {number for number, _ in sent}, name
        assert least_s <= end.after_s < most_s, name
        assert "Traceback" not in end.stderr or INT in dict(sent), name
        assert modtrace.open_recording(tmp_path / f"{name}.modtrace").table("steps").num_rows >= 4, name


def test_call_that_comes_back_while_the_recording_is_closed_changes_nothing(tmp_path: Path) -> None:
    body = "try:\n    ready()\n    block({})\nfinally:\n    print('finally')"
    programs = {f"after_{ms}": (body.format(ms / 1000), [(TERM, 0.0)]) for ms in (340, *range(440, 600, 20))}
    ends = run_all(tmp_path, programs)
    for name, end in ends.items():
        assert (end.status, end.after_s < 2) == (-TERM, True), name
        assert marks_of(tmp_path, name) == (
            "the run ended by Terminated: SIGTERM; step 3 was the last to end",
        )
        assert end.stderr.count("modtrace: recorded 5 steps") == 1
        assert "Traceback" not in end.stderr
    assert ends["after_340"].stdout.endswith("finally\n")


#: The import of the compiled part fails anew.
NOT_COMPILED = """
import importlib, sys
import modtrace.cli.interrupts as interrupts
sys.modules["modtrace.cli._blocked_call"] = None
del sys.modules["modtrace.cli"]._blocked_call
importlib.reload(interrupts)
assert interrupts.blocked_call is None
"""


def test_without_the_compiled_part_signals_are_as_ever(tmp_path: Path) -> None:
    write_program(tmp_path, "train", BEGIN + "os.kill(os.getpid(), signal.SIGTERM)\ntime.sleep(9)\n")
    done = end_of_modtrace(tmp_path, "record", "-q", "train.py", before=NOT_COMPILED)
    assert (done.status, done.stderr) == (-TERM, "")
    assert marks_of(tmp_path, "train") == (
        "the run ended by Terminated: SIGTERM; step 3 was the last to end",
    )
