"""Runs many commands of `modtrace`, or programs, sends them signals, and returns how they end.

As a program it imports what `modtrace record` needs, and then forks for each command that its standard input names: a
process takes seconds to import torch. It serves all tests of a run, each line is one question, and ends with them.
A program that runs unrecorded needs no torch: Python takes a second to end a process that has imported it.
"""

import atexit
import contextlib
import ctypes
import functools
import gc
import json
import os
import signal
import subprocess
import sys
import tempfile
import textwrap
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

#: A command that is sent signals has written this line before.
READY = "ready"

#: Seconds of a processor after which a command that does not sleep has begun what it is to be interrupted in.
_BEGUN_S = 0.1

#: So many commands that are sent signals run beside each other.
_BESIDE = 4
_LONGEST_S = 60.0


class End(NamedTuple):
    """How a process has ended: negative statuses are signals."""

    status: int
    stdout: str
    stderr: str


class Signalled(NamedTuple):
    """A command that is sent signals, each so many seconds after the one before, the first after `READY`.

    The first waits besides until the command sleeps or computes: on a busy machine it may be held up behind `READY`.
    """

    arguments: Sequence[str]
    signals: Sequence[tuple[int, float]]


class EndAfterSignal(NamedTuple):
    """How a process has ended, and how long after the last signal. -9 if it did not end."""

    status: int
    stdout: str
    stderr: str
    after_s: float


def ends_of_python(folder: Path, commands: Mapping[str, Sequence[str]]) -> dict[str, End]:
    """Returns how `python` ends with the arguments of each command."""
    return {name: _run([sys.executable, *arguments], folder) for name, arguments in commands.items()}


def ends_of_modtrace(
    folder: Path, commands: Mapping[str, Sequence[str]], *, is_recorded: bool = True, before: str = ""
) -> dict[str, End]:
    """Returns how `modtrace` ends with the arguments of each command.

    Args:
        folder: where it runs.
        commands: the arguments, by a name for them.
        is_recorded: False runs the programs as after an error of modtrace's own at the beginning.
        before: Python that the process of each command runs first.
    """
    statuses = _ask(is_recorded, {"folder": str(folder), "before": before, "commands": commands})
    return {name: End(statuses[name], *_output_of(folder, name)) for name in commands}


def end_of_modtrace(folder: Path, *arguments: str, before: str = "") -> End:
    """As `ends_of_modtrace`, of one command."""
    return ends_of_modtrace(folder, {"command": arguments}, before=before)["command"]


def end_of_program(folder: Path, code: str, *arguments: str) -> End:
    """Returns how `python -c code` ends in a process that has imported torch and modtrace, and has recorded a run."""
    return end_of_modtrace(folder, "-c", code, *arguments)


def ends_after_signals(folder: Path, commands: Mapping[str, Signalled]) -> dict[str, EndAfterSignal]:
    """Returns how `modtrace` ends with the arguments of each command, some of which run beside each other."""
    ends = _ask(True, {"folder": str(folder), "signalled": True, "commands": commands})
    return {
        name: EndAfterSignal(status, *_output_of(folder, name), after_s)
        for name, (status, after_s) in ends.items()
    }


def _ask(is_recorded: bool, question: Mapping[str, Any]) -> Any:
    server = _start_server("recorded" if is_recorded else "unrecorded")
    assert server.stdin is not None and server.stdout is not None
    server.stdin.write(json.dumps(question) + "\n")
    server.stdin.flush()
    return json.loads(server.stdout.readline())


@functools.cache
def _start_server(how: str) -> "subprocess.Popen[str]":
    """It ends when its standard input does: with this process."""
    command = [sys.executable, __file__, how]
    server = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    atexit.register(_stop_server, server, os.getpid())
    return server


def _stop_server(server: "subprocess.Popen[str]", started_by: int) -> None:
    if os.getpid() == started_by:  # no fork of it
        server.communicate()


def _output_of(folder: Path, name: str) -> tuple[str, str]:
    files = folder / f"{name}.out", folder / f"{name}.err"
    stdout, stderr = (file.read_text() for file in files)
    for file in files:
        file.unlink()
    return stdout, stderr


def _run(command: Sequence[str], folder: Path) -> End:
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=60)
    return End(done.returncode, done.stdout, done.stderr)


def write_program(folder: Path, name: str, source: str) -> None:
    """Writes a program that can be run as a script and as a module."""
    (folder / f"{name}.py").write_text(textwrap.dedent(source))


def _fork(name: str, arguments: Sequence[str], before: str = "") -> int:
    """Returns 0 in the child, whose end is that of the command."""
    child = os.fork()
    if not child:
        os.setpgid(0, 0)
        sys.argv[1:] = arguments
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        for number, stream in ((1, "out"), (2, "err")):
            os.dup2(os.open(f"{name}.{stream}", os.O_WRONLY | os.O_CREAT | os.O_TRUNC), number)
        exec(before, {"__name__": "__main__"})
    return child


def _fork_for_each(commands: Mapping[str, Sequence[str]], before: str) -> None:
    """Returns in each child; in the parent it prints all statuses and ends."""
    statuses = {}
    for name, arguments in commands.items():
        child = _fork(name, arguments, before)
        if not child:
            return
        statuses[name] = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    _end_agent(statuses)


class _Child:
    """A command that runs, and the signals that it is still to be sent."""

    def __init__(self, name: str, process: int, signals: Sequence[tuple[int, float]]) -> None:
        self._output = Path(f"{name}.out")
        self._process = process
        self._signals = list(signals)
        self._since_s = time.monotonic()
        self._ready_s: float | None = None

    def look(self) -> tuple[int, float] | None:
        """Sends a signal that is due. Returns how it has ended, if it has."""
        ended, status = os.waitpid(self._process, os.WNOHANG)
        after_s = time.monotonic() - self._since_s
        if ended:
            self._kill()  # what it has forked
            return os.waitstatus_to_exitcode(status), after_s
        if after_s > _LONGEST_S:
            self._kill()
        elif self._ready_s is None:
            if self._output.exists() and READY in self._output.read_text():
                self._ready_s, self._since_s = self._look_at_thread()[1], time.monotonic()
        elif self._signals and after_s >= self._signals[0][1] and self._has_begun():
            self._ready_s = 0.0
            os.kill(self._process, self._signals.pop(0)[0])
            self._since_s = time.monotonic()
        return None

    def _has_begun(self) -> bool:
        sleeps, used_s = self._look_at_thread()
        return sleeps or used_s - (self._ready_s or 0.0) >= _BEGUN_S

    def _look_at_thread(self) -> tuple[bool, float]:
        """Returns whether the first thread sleeps, and the seconds of a processor that it has used."""
        fields = (
            Path(f"/proc/{self._process}/task/{self._process}/stat").read_text().rpartition(")")[2].split()
        )
        return fields[0] == "S", (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    def _kill(self) -> None:
        with contextlib.suppress(OSError):
            os.killpg(self._process, signal.SIGKILL)


def _fork_beside_each_other(
    commands: Mapping[str, tuple[Sequence[str], Sequence[tuple[int, float]]]],
) -> None:
    """As `_fork_for_each`, with signals."""
    waiting, running, ends = list(commands.items()), {}, {}
    while waiting or running:
        while waiting and len(running) < _BESIDE:
            name, (arguments, signals) = waiting.pop(0)
            child = _fork(name, arguments)
            if not child:
                return
            running[name] = _Child(name, child, signals)
        time.sleep(0.01)
        for name, child in list(running.items()):
            if (end := child.look()) is not None:
                ends[name] = end
                del running[name]
    _end_agent(ends)


def _end_agent(ends: object) -> None:
    print(json.dumps(ends), flush=True)
    os._exit(0)


#: What is imported here before the first command, without what is ours.
_IMPORTED: dict[str, Any] = {}


def _hide_imported() -> None:
    """Leaves Python nothing to clear, as it ends, of what is imported here, which would take it half a second."""
    sys.modules.update(dict.fromkeys(_IMPORTED))  # type: ignore[arg-type]


def _end_soon() -> None:
    """Has the processes of commands end without the destructors of torch's C++, and as `_hide_imported` says."""
    ours = ("modtrace", "__main__", "builtins", "sys")
    _IMPORTED.update({name: each for name, each in sys.modules.items() if name.partition(".")[0] not in ours})
    for module in _IMPORTED.values():
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(module))
    ctypes.CDLL(None).on_exit(ctypes.CDLL(None)._exit, None)


def _prepare(is_recorded: bool) -> None:
    from modtrace.cli import record

    signal.signal(signal.SIGHUP, signal.SIG_DFL)  # whoever started the tests may ignore them
    signal.signal(signal.SIGINT, signal.default_int_handler)
    if not is_recorded:
        record._make_recording = lambda *_: None
        return
    with tempfile.TemporaryDirectory() as folder, contextlib.suppress(SystemExit):
        write_program(Path(folder), "empty", "import torch._dynamo, torch.distributed\n")
        sys.argv[1:] = ["record", "-q", "--to", f"{folder}/run", f"{folder}/empty.py"]
        main()


def _run_program() -> None:
    code = sys.argv.pop(2)
    del sys.argv[0]
    sys.path[0] = ""
    exec(compile(code, "<string>", "exec"), {"__name__": "__main__"})


def _serve() -> None:
    """Returns in the process of each command. Each question is answered by a fork, in the folder of its own."""
    for line in sys.stdin:
        agent = os.fork()
        if agent:
            os.waitpid(agent, 0)
            continue
        question = json.loads(line)
        os.chdir(question["folder"])
        if question.get("signalled"):
            _fork_beside_each_other(question["commands"])
        else:
            _fork_for_each(question["commands"], question["before"])
        return
    os._exit(0)


if __name__ == "__main__":
    atexit.register(_hide_imported)  # before all others, so that it comes last
    from modtrace.cli.main import main

    _prepare(sys.argv[1] == "recorded")
    _end_soon()
    gc.freeze()  # what is imported: the processes of commands need not look through it as they end
    _serve()
    _run_program() if sys.argv[1:2] == ["-c"] else main()
