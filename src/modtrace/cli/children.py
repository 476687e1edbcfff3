"""Counts the Python processes that a program starts, because the recording of this process does not contain them."""

import functools
import multiprocessing.process
import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from typing import Any

#: The modules of functions that helper processes run, which train nothing: DataLoader's workers and the servers of
#: managers. Processes that inductor starts are recognised by their caller.
_HELPERS = ("torch.utils.data.", "multiprocessing.managers")

_SHELLS = ("sh", "bash", "dash", "zsh")


class StartedProcesses:
    """Counts the Python processes that are started while it is entered.

    Both functions by which the standard library starts processes are replaced meanwhile. An audit hook would see less
    (multiprocessing's `spawn` raises no event in Python 3.11), and would be called for every `sys._getframe()`, i.e.
    once for each op.
    """

    def __init__(self) -> None:
        self.count = 0

    def __enter__(self) -> "StartedProcesses":
        from ..torch_internals.call_frames import is_started_by_compiler

        self._start = multiprocessing.process.BaseProcess.start
        self._popen = subprocess.Popen.__init__
        start, popen = self._start, self._popen

        @functools.wraps(start)
        def count_start(process: Any) -> None:
            module = getattr(getattr(process, "_target", None), "__module__", None) or ""
            start(process)  # afterwards the target is forgotten
            self.count += not (module.startswith(_HELPERS) or is_started_by_compiler(sys._getframe(1)))

        @functools.wraps(popen)
        def count_popen(process: Any, args: Any, *more: Any, **options: Any) -> None:
            popen(process, args, *more, **options)
            self.count += runs_python(args) and not is_started_by_compiler(sys._getframe(1))

        multiprocessing.process.BaseProcess.start = count_start  # type: ignore[assignment, method-assign]
        subprocess.Popen.__init__ = count_popen  # type: ignore[assignment, method-assign]
        return self

    def __exit__(self, *raised: object) -> None:
        multiprocessing.process.BaseProcess.start = self._start  # type: ignore[method-assign]
        subprocess.Popen.__init__ = self._popen  # type: ignore[method-assign]


def runs_python(command: Any) -> bool:
    """Returns whether a command, as `subprocess.Popen` takes it, is Python or a script that Python runs."""
    words = _words(command)
    if len(words) > 2 and os.path.basename(words[0]) in _SHELLS and words[1] == "-c":
        words = words[2].split()
    if not words:
        return False
    program = words[0]
    if program == sys.executable or os.path.basename(program).startswith("python"):
        return True
    return _is_python_script(shutil.which(program))


def _words(command: Any) -> Sequence[str]:
    try:
        if isinstance(command, (str, bytes, os.PathLike)):
            return os.fsdecode(command).split()
        return [os.fsdecode(word) for word in command]
    except TypeError:  # Popen has refused the command, or accepts types that we do not know
        return []


def _is_python_script(path: str | None) -> bool:
    if path is None:
        return False
    try:
        with open(path, "rb") as file:
            first_line = file.readline(200)
    except OSError:
        return False
    return first_line.startswith(b"#!") and b"python" in first_line
