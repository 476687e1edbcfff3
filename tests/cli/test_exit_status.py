"""`modtrace record` ends as `python` does: with its status, by its signal, and with the same output."""

import re
from collections.abc import Iterable
from pathlib import Path

import pytest

import modtrace
from helpers.command_ends import End, ends_of_modtrace, ends_of_python, write_program

#: What is given to `sys.exit()`.
CODES = [
    *("0", "7", "128", "255", "256", "-1", "-15", "-256"),
    *("2**31 - 1", "2**31", "-(2**31)", "2**32 + 5", "2**63 - 1", "2**63", "-(2**63)", "-(2**70)"),
    *("True", "None", "''", "'no luck'", "'\\ud800'", "0.0", "(1, 2)", "object", "-signal.SIGHUP"),
]

#: Other ways to end, each the body of a program.
WAYS = {
    "two_arguments": "raise SystemExit(1, 2)",
    "code_set_later": "error = SystemExit(3)\nerror.code = -9\nraise error",
    "code_raises": "class Ended(SystemExit):\n    code = property(lambda self: 1 / 0)\nraise Ended(3)",
    "own_int": "class Code(int): pass\nsys.exit(Code(-3))",
    "int_without_truth": "class Code(int):\n    __bool__ = None\nsys.exit(Code(0))",
    "no_truth": "class Code:\n    def __bool__(self): raise TypeError\nsys.exit(Code)",
    "no_text": "class Code:\n    def __str__(self): raise TypeError\nsys.exit(Code())",
    "falls_off": "print('all')",
    "error": "raise ValueError('boom')",
    "base_exception": "raise BaseException('boom')",
    "interrupt": "raise KeyboardInterrupt",
    "subclass_of_interrupt": "class Stop(KeyboardInterrupt): pass\nraise Stop",
    "interrupt_and_atexit": "atexit.register(print, 'at the end')\nos.kill(os.getpid(), signal.SIGINT)\ntime.sleep(9)",
    "interrupt_and_thread": "threading.Timer(0.2, print, ['of a thread']).start()\nraise KeyboardInterrupt",
    "in_a_thread": "thread = threading.Thread(target=sys.exit, args=(3,))\nthread.start()\nthread.join()",
    "in_atexit": "atexit.register(sys.exit, 3)",
    "at_once_in_atexit": "atexit.register(os._exit, 9)\nsys.exit(-1)",
    "at_once": "print('all', flush=True)\nos._exit(5)",
    "in_finally": "try:\n    sys.exit(-1)\nfinally:\n    sys.exit(-2)",
    "in_a_fork": "if os.fork():\n    print(os.wait()[1])\nelse:\n    sys.exit(-1)",
    "killed": "os.kill(os.getpid(), signal.SIGKILL)",
    "aborted": "os.abort()",
    "hook_exits": "sys.excepthook = lambda *_: sys.exit(-5)\nraise ValueError",
    "hook_raises": "def hook(*_):\n    raise TypeError('in the hook')\nsys.excepthook = hook\nraise ValueError",
    "hook_interrupts": "def hook(*_):\n    raise KeyboardInterrupt\nsys.excepthook = hook\nraise ValueError",
    "hook_is_none": "sys.excepthook = None\nraise ValueError",
    "no_hook": "del sys.excepthook\nraise ValueError",
    "no_stderr": "sys.stderr = None\nsys.exit('to nobody')",
    "stderr_deleted": "del sys.stderr\nsys.exit('to nobody')",
    "stderr_closed": "sys.stderr.close()\nsys.exit('to nobody')",
}

IMPORTS = "import atexit, os, signal, sys, threading, time\n"


#: Those that are run with a recording too, and the mark of it: none says that the recording was not closed.
MARKS = {
    "sys.exit(-1)": "the run ended by SystemExit: -1",
    "sys.exit(2**64)": "the run ended by SystemExit: 18446744073709551616",
    "sys.exit('')": "the run ended by SystemExit",
    "sys.exit(0.0)": "the run ended by SystemExit: 0.0",
    WAYS["interrupt_and_atexit"]: "the run ended by KeyboardInterrupt",
    WAYS["error"]: "the run ended by ValueError: boom",
    WAYS["int_without_truth"]: None,
    WAYS["no_truth"]: "the run ended by SystemExit: <class '__main__.Code'>",
    WAYS["no_text"]: "the run ended by SystemExit",
    WAYS["code_raises"]: "the run ended by Ended: 3",
}


def end_all(
    folder: Path, bodies: Iterable[str], *, as_module: bool, is_recorded: bool
) -> dict[str, tuple[End, End]]:
    """Returns how each program ends, without and with modtrace."""
    names = {f"program_{at}": body for at, body in enumerate(bodies)}
    for name, body in names.items():
        write_program(folder, name, IMPORTS + body + "\n")
    programs = {name: ["-m", name] if as_module else [f"{name}.py"] for name in names}
    plain = ends_of_python(folder, programs)
    commands = {name: ["record", "-q", *words] for name, words in programs.items()}
    ends = ends_of_modtrace(folder, commands, is_recorded=is_recorded)
    return {body: (_without_runpy(plain[name]), ends[name]) for name, body in names.items()}


@pytest.mark.parametrize("as_module", [False, True], ids=["script", "module"])
def test_program_ends_as_it_ends_under_python(tmp_path: Path, as_module: bool) -> None:
    """A module has another traceback alone, by a branch of its own."""
    bodies = [*(f"sys.exit({code})" for code in CODES), *WAYS.values()]
    if as_module:
        bodies = [WAYS[name] for name in ("falls_off", "error", "interrupt", "hook_raises", "no_text")]
    ends = end_all(tmp_path, bodies, as_module=as_module, is_recorded=False)
    assert [(body, *pair) for body, pair in ends.items() if pair[0] != pair[1]] == []


def test_recorded_program_ends_as_it_ends_under_python_and_its_recording_is_closed(tmp_path: Path) -> None:
    ends = end_all(tmp_path, MARKS, as_module=False, is_recorded=True)
    assert [(body, *pair) for body, pair in ends.items() if pair[0] != pair[1]] == []
    for at, mark in enumerate(MARKS.values()):
        rec = modtrace.open_recording(tmp_path / f"program_{at}.modtrace")
        assert [re.sub(r", at program_\d+\.py:\d+$", "", one) for one in rec.meta.marks] == [
            *filter(None, [mark])
        ]


def _without_runpy(end: End) -> End:
    """Returns the end with the traceback that a script has: `python -m` shows two frames of runpy's in front."""
    frames = r'  File "<frozen runpy>", line \d+, in \w+\n'
    return end._replace(stderr=re.sub(frames, "", end.stderr))
