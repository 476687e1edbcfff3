"""Runs each of many pieces of code in a fork of one process, and tells what it has changed there.

The process has imported what every user of modtrace has: numpy, pyarrow and torch. It is a program of its own, for a
process that runs tests has imported everything already.
"""

import hashlib
import json
import locale
import os
import random
import signal
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any, TypedDict

#: Of libraries that only the command line uses, or nothing does: code that records or reads imports none of them.
OF_COMMANDS = ("click", "rich")


class Change(TypedDict):
    """What a piece of code has done to its process."""

    moved: list[str]  # generators that were drawn from, and other state that is not as it was
    imported: list[str]  # of `OF_COMMANDS`
    state: dict[str, str]  # behind the code
    error: str | None  # what the code raised


def changes_of(programs: dict[str, str], folder: Path, *, before: str = "") -> dict[str, Change]:
    """What each program changes, in a fork of its own that runs in the folder.

    Args:
        programs: code by name.
        folder: where all of them run.
        before: what the process does before it forks.
    """
    done = subprocess.run(
        [sys.executable, __file__],
        input=json.dumps([before, programs]),
        cwd=folder,
        capture_output=True,
        text=True,
        check=False,
        timeout=600,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stderr
    found: dict[str, Change] = json.loads(done.stdout)
    return found


def state() -> dict[str, str]:
    """What belongs to the user in this process."""
    import numpy as np
    import torch

    return {
        "random": _digest(random.getstate()),
        "numpy": _digest(np.random.get_state(legacy=True)[1:3]),
        "torch": _digest(torch.get_rng_state().tolist()),
        "warnings": repr(warnings.filters),
        "environment": repr(sorted(os.environ.items())),
        "locale": locale.setlocale(locale.LC_ALL),
        "signals": repr([signal.getsignal(each) for each in sorted(signal.valid_signals())]),
    }


def _digest(values: Any) -> str:
    import numpy as np

    with np.printoptions(threshold=sys.maxsize):
        return hashlib.sha256(repr(values).encode()).hexdigest()


def _change_of(code: str) -> Change:
    _seed()
    before, error = state(), None
    try:
        exec(code, {"__name__": "__first_use__"})
    except SystemExit as raised:
        error = f"exit code {raised.code}" if raised.code else None
    except BaseException as raised:
        error = repr(raised)
    after = state()
    return {
        "moved": [name for name in before if after[name] != before[name]],
        "imported": [name for name in OF_COMMANDS if name in sys.modules],
        "state": after,
        "error": error,
    }


def _seed() -> None:
    """After a fork, Python seeds its `random` anew."""
    import numpy as np
    import torch

    random.seed(0)
    np.random.seed(0)
    torch.manual_seed(0)


def _run_in_fork(code: str) -> Change:
    reading, writing = os.pipe()
    if os.fork() == 0:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        os.write(writing, json.dumps(_change_of(code)).encode())
        os._exit(0)
    os.close(writing)
    with open(reading) as told:
        change: Change = json.loads(told.read())
    os.wait()
    return change


if __name__ == "__main__":
    import numpy  # noqa: F401
    import pyarrow  # noqa: F401
    import torch  # noqa: F401

    before, programs = json.loads(sys.stdin.read())
    exec(before, {"__name__": "__first_use__"})
    print(json.dumps({name: _run_in_fork(code) for name, code in programs.items()}))
