"""Jobs that hang are killed, and the recording says which rank did not come, and to what."""

import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack
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


@pytest.fixture(params=WANTED)
def how(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def killed(how: str, tmp_path: Path) -> Iterator[str]:
    """The recording of a run of two ranks that were killed, all at once, while they hung."""
    to = str(tmp_path / "run.modtrace")
    program = [sys.executable, hanging_training.__file__, how, to, str(tmp_path / "store")]
    environment = {**os.environ, "WORLD_SIZE": "2", "TORCHELASTIC_RUN_ID": "hangs"}
    with ExitStack() as stack:
        ranks = [
            stack.enter_context(
                subprocess.Popen(
                    program, env={**environment, "RANK": str(rank)}, stdout=subprocess.PIPE, text=True
                )
            )
            for rank in (0, 1)
        ]
        stack.callback(lambda: [rank.kill() for rank in ranks])
        for rank in ranks:
            assert rank.stdout is not None
            assert rank.stdout.readline() == "hangs\n"
        time.sleep(HANGS_S)
        for rank in ranks:
            rank.kill()
            rank.wait()
        yield to


def test_rank_that_did_not_come_is_named(killed: str, how: str, command: Command) -> None:
    told = command("ranks", killed, code=1).out.splitlines()
    assert [re.sub(r"was there for \S+ when last seen", "waits", line) for line in told[:3]] == WANTED[how]
