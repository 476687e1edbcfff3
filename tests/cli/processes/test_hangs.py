"""Jobs that hang are killed, and the recording says which rank did not come, and to what."""

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from helpers import hanging_training
from helpers.command_line import Command

#: The ranks look twice a second, and a wait of a second is told; torch needs a while for the first look at its log.
HANGS_S = 4.0

WANTED = {
    "python": [
        "rank 1 has not come to all_reduce 31 of group 0:default_pg",
        "  rank 0 waits: step 7, 2, forward",
        "  the last of rank 1: all_reduce 30, step 7, 1, forward",
    ],
    "buckets": [
        "rank 1 has not come to all_reduce 19 of group 0:default_pg",
        "  rank 0 waits: step 7, 3.linear to 2.linear, backward",
        "  the last of rank 1: all_reduce 18, step 6, 1.linear to 0.linear",
    ],
    "message": [
        "rank 0 has not sent message 1 of group 0:default_pg to rank 1",
        "  rank 1 waits: step 7, 2, forward",
        "  the last of rank 0: it has done nothing there",
    ],
}


@pytest.fixture(scope="module")
def killed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of recordings of two ranks each, that were killed all at once while they hung, by the way to hang."""
    folder = tmp_path_factory.mktemp("hangs")
    program = [sys.executable, hanging_training.__file__, *WANTED, str(folder)]
    with subprocess.Popen(program, stdout=subprocess.PIPE, text=True, start_new_session=True) as ranks:
        try:
            assert ranks.stdout is not None
            for _ in range(2 * len(WANTED)):
                assert ranks.stdout.readline() == "hangs\n"
            time.sleep(HANGS_S)
        finally:
            os.killpg(ranks.pid, signal.SIGKILL)
    return folder


@pytest.mark.parametrize("how", WANTED)
def test_rank_that_did_not_come_is_named(killed: Path, how: str, command: Command) -> None:
    told = command("ranks", str(killed / f"{how}.modtrace"), code=1).out.splitlines()
    assert [re.sub(r"was there for \S+ when last seen", "waits", line) for line in told[:3]] == WANTED[how]
