"""Starts the ranks of a run with torch's own launcher, each as `modtrace record`."""

import os
import re
import subprocess
import sys
from collections.abc import Sequence
from importlib.util import find_spec

import click

from ..optional import require

#: What is passed on to torchrun's `--nproc-per-node`.
_COUNT = re.compile(r"[1-9]\d*|gpu|cpu|auto")

#: The environment variables by which a process knows that it is a rank.
_RANK = ("RANK", "LOCAL_RANK")


def check_count(ctx: click.Context, param: click.Parameter, value: str | None) -> str | None:
    """Returns the value of `--nproc`, if the launcher takes it and this process is no rank itself."""
    if value is None:
        return None
    if not _COUNT.fullmatch(value):
        raise click.BadParameter(f"{value!r}: give the number of ranks, or gpu, cpu or auto.")
    rank = next((name for name in _RANK if name in os.environ), None)
    if rank is not None:
        place = f"{rank}={os.environ[rank]}"
        raise click.BadParameter(f"it starts ranks, and this process is one already ({place}). Leave it out.")
    return value


def start_ranks(count: str, arguments: Sequence[str]) -> int:
    """Runs `modtrace record` with these arguments in as many ranks, and returns the exit code of the launcher.

    The ranks meet at a free port of this machine.
    """
    if find_spec("torch") is None:  # importing it would take seconds, and each rank imports it
        require("torch", "modtrace record")
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={count}"]
    with subprocess.Popen([*launcher, "-m", "--", "modtrace", "record", *arguments]) as started:
        while True:
            try:
                return started.wait()
            except KeyboardInterrupt:  # the terminal has sent it to the launcher, too, which ends the ranks
                continue
