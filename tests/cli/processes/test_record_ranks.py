"""Ranks of every launcher write one recording, each run its own, and none dies or keeps the others waiting."""

import itertools
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from helpers import forked_ranks
from modtrace.store.json_files import read_header
from modtrace.store.reader import FolderReader

TIMEOUT_S = 240.0
MODTRACE = [sys.executable, "-m", "modtrace"]

Variables = dict[str, str]


class Ended(NamedTuple):
    """A rank that has ended."""

    code: int | None  # None: it had to be killed
    output: str


class Launcher:
    """Starts ranks as forks of one program, which has imported torch."""

    def __init__(self, process: "subprocess.Popen[str]") -> None:
        self._process = process
        self._numbers = itertools.count()

    def run(self, folder: Path, ranks: Sequence[dict[str, Any]]) -> list[Ended]:
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write(json.dumps({"folder": str(folder), "ranks": ranks}) + "\n")
        self._process.stdin.flush()
        return [Ended(*rank) for rank in json.loads(self._process.stdout.readline())]

    def record(
        self, folder: Path, steps: int, variables: Sequence[Variables], *options: str, delay_s: float = 0.0
    ) -> list[Ended]:
        """Runs `modtrace record` in as many ranks, of which the first begins later."""
        (folder / "train.py").write_text(forked_ranks.TRAIN)
        program = [*options, "train.py", str(steps), f"store-{next(self._numbers)}", str(len(variables))]
        return self.run(
            folder,
            [
                {"env": each, "argv": ["record", *program], "delay_s": delay_s * (rank == 0)}
                for rank, each in enumerate(variables)
            ],
        )

    def spawn(self, folder: Path, steps: int, world_size: int, when: str) -> Ended:
        """Runs a program that starts the ranks as its own workers."""
        store = f"store-{next(self._numbers)}"
        argv = ["run.modtrace", str(steps), store, str(world_size), when]
        [ended] = self.run(folder, [{"env": {}, "argv": argv, "run": "workers"}])
        return ended


@pytest.fixture(scope="module")
def launcher() -> Iterator[Launcher]:
    command = [sys.executable, forked_ranks.__file__]
    environment = {name: value for name, value in os.environ.items() if not name.startswith(FOREIGN)}
    with subprocess.Popen(
        command,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=environment,
        start_new_session=True,
    ) as process:
        yield Launcher(process)
        os.killpg(process.pid, signal.SIGKILL)


FOREIGN = ("RANK", "WORLD_SIZE", "MASTER_", "TORCHELASTIC_", "SLURM_", "OMPI_", "PMI_", "PMIX_")
MEETING = {"MASTER_ADDR": "localhost", "MASTER_PORT": "29500"}


def by_hand(rank: int, world_size: int) -> Variables:
    return {"RANK": str(rank), "WORLD_SIZE": str(world_size), **MEETING}


def torchrun(rank: int, world_size: int, restarts: int = 0) -> Variables:
    elastic = {"TORCHELASTIC_RUN_ID": "none", "TORCHELASTIC_RESTART_COUNT": str(restarts)}
    return {**by_hand(rank, world_size), **elastic}


def torchrun_with_id(rank: int, world_size: int) -> Variables:
    return {**torchrun(rank, world_size), "TORCHELASTIC_RUN_ID": "mine"}


def slurm(rank: int, world_size: int) -> Variables:
    return {"SLURM_JOB_ID": "77", "SLURM_PROCID": str(rank), "SLURM_NTASKS": str(world_size)}


def pmi(rank: int, world_size: int) -> Variables:
    return {"PMI_RANK": str(rank), "PMI_SIZE": str(world_size)}


#: Where they meet, what they are called and that they are several are found in as many ways: tests/collect/recorder/
#: test_launch.py has the variables of all launchers.
LAUNCHERS = (by_hand, torchrun_with_id, slurm, pmi)
LARGE = pytest.param(4, marks=pytest.mark.soak)


def check(path: Path, world_size: int, steps: int, attempt: str = "") -> str:
    """Whether the recording is one of this many ranks, each with its own steps and closed. Returns its run id."""
    header = read_header(path)
    assert header is not None
    for rank in range(world_size):
        reader = FolderReader(path / f"rank-{rank:05d}{attempt}")
        meta = reader.meta
        assert (meta.rank, meta.world_size, meta.run_id) == (rank, world_size, header.run_id)
        assert (meta.complete, reader.table("steps").num_rows) == (True, steps)
    return header.run_id


def have_trained(ranks: Sequence[Ended]) -> bool:
    return [rank.code for rank in ranks] == [0] * len(ranks) and all(
        "trained\n" in rank.output for rank in ranks
    )


@pytest.mark.parametrize("world_size", [2, LARGE])
@pytest.mark.parametrize("variables", LAUNCHERS)
def test_second_run_replaces_the_first_if_it_may_and_trains_unrecorded_if_not(
    launcher: Launcher, tmp_path: Path, variables: Callable[[int, int], Variables], world_size: int
) -> None:
    path, ranks = tmp_path / "run.modtrace", [variables(rank, world_size) for rank in range(world_size)]
    names = [*(f"rank-{rank:05d}" for rank in range(world_size)), "recording.json"]
    assert have_trained(launcher.record(tmp_path, 2, ranks, "--to", "run.modtrace"))
    first = check(path, world_size, steps=2)
    refused = launcher.record(tmp_path, 3, ranks, "--to", "run.modtrace")
    assert have_trained(refused)
    for rank, ended in enumerate(refused):
        warning = ended.output.splitlines()[0]
        assert warning.startswith(
            f"modtrace: warning: rank {rank} of {world_size} is not recorded, and the run goes on: run.modtrace: "
        )
        assert warning.endswith("Give another path, or overwrite=True (--overwrite) to replace it.")
        assert "can be deleted" not in ended.output
    assert check(path, world_size, steps=2) == first
    replacing = launcher.record(tmp_path, 4, ranks, "--to", "run.modtrace", "--overwrite")
    assert have_trained(replacing)
    assert (check(path, world_size, steps=4) != first) or variables is torchrun_with_id
    assert sorted(entry.name for entry in path.iterdir()) == names


def test_more_ranks_or_fewer_replace_a_run(launcher: Launcher, tmp_path: Path) -> None:
    path = tmp_path / "run.modtrace"
    for world_size in (2, 4, 3):
        ranks = [torchrun(rank, world_size) for rank in range(world_size)]
        assert have_trained(
            launcher.record(tmp_path, world_size, ranks, "--to", "run.modtrace", "--overwrite")
        )
        check(path, world_size, steps=world_size)
        assert len(list(path.iterdir())) == world_size + 1


def test_rank_that_starts_late_joins_the_others(launcher: Launcher, tmp_path: Path) -> None:
    ranks = [slurm(rank, 2) for rank in range(2)]
    assert have_trained(launcher.record(tmp_path, 2, ranks, "--to", "run.modtrace", delay_s=3))
    check(tmp_path / "run.modtrace", 2, steps=2)


def test_ranks_choose_one_name_if_none_is_given(launcher: Launcher, tmp_path: Path) -> None:
    for name, delay_s in (("train", 0.0), ("train-2", 2.0)):
        assert have_trained(launcher.record(tmp_path, 2, [by_hand(0, 2), by_hand(1, 2)], delay_s=delay_s))
        check(tmp_path / f"{name}.modtrace", 2, steps=2)
    assert len(list(tmp_path.glob("*.modtrace"))) == 2


def test_restarted_ranks_add_an_attempt(launcher: Launcher, tmp_path: Path) -> None:
    path = tmp_path / "run.modtrace"
    for restarts in range(2):
        ranks = [torchrun(rank, 2, restarts) for rank in range(2)]
        assert have_trained(
            launcher.record(tmp_path, 2 + restarts, ranks, "--to", "run.modtrace", "--overwrite")
        )
    assert check(path, 2, steps=2) == check(path, 2, steps=3, attempt=".attempt-1")


def test_ranks_that_cannot_write_train_all_the_same(launcher: Launcher, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("precious")
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "notes.txt").write_text("precious")
    for to in ("file", "folder", "file/run.modtrace"):
        ranks = launcher.record(tmp_path, 1, [by_hand(0, 2), by_hand(1, 2)], "--to", to, "--overwrite")
        assert have_trained(ranks)
        assert all("is not recorded, and the run goes on: " in rank.output for rank in ranks)
    assert (tmp_path / "file").read_text() == (tmp_path / "folder" / "notes.txt").read_text() == "precious"


@pytest.mark.parametrize("world_size", [2, LARGE])
def test_workers_are_the_ranks_that_torch_distributed_knows(
    launcher: Launcher, tmp_path: Path, world_size: int
) -> None:
    path = tmp_path / "run.modtrace"
    assert launcher.spawn(tmp_path, 2, world_size, "after").output.count("trained") == world_size
    first = check(path, world_size, steps=2)
    refused = launcher.spawn(tmp_path, 3, world_size, "after")
    assert (refused.code, refused.output.count("trained")) == (0, world_size)
    assert refused.output.count("is not recorded, and the run goes on: ") == world_size
    assert check(path, world_size, steps=2) == first
    assert launcher.spawn(tmp_path, 4, world_size, "after, overwrite").code == 0
    assert check(path, world_size, steps=4) != first


@pytest.mark.parametrize("when", ["before", "before, overwrite"])
def test_worker_whose_rank_is_not_known_takes_nobodys_place(
    launcher: Launcher, tmp_path: Path, when: str
) -> None:
    ended = launcher.spawn(tmp_path, 2, 2, when)
    assert (ended.code, ended.output.count("trained")) == (0, 2)
    assert ended.output.count("ModtraceWarning: this process is not recorded, and the run goes on: ") == 1
    assert "If it is a rank, enter record() after init_process_group(), or set RANK" in ended.output
    reader = FolderReader(tmp_path / "run.modtrace")
    assert (reader.meta.complete, reader.table("steps").num_rows) == (True, 2)
    assert len(list((tmp_path / "run.modtrace").iterdir())) == 2


@pytest.mark.soak
def test_workers_that_python_spawns_are_ranks_too(tmp_path: Path) -> None:
    command = [sys.executable, forked_ranks.__file__, "run.modtrace", "2", "store", "2", "after"]
    done = _run(command, tmp_path)
    assert (done.returncode, done.stdout.count("trained")) == (0, 2)
    check(tmp_path / "run.modtrace", 2, steps=2)


@pytest.mark.soak
def test_line_of_the_docs_records_again_and_again(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(forked_ranks.TRAIN)
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    launch = ["--nproc-per-node=2", f"--master-port={port}", "--no-python"]
    for steps, options in ((2, []), (3, ["--overwrite"])):
        program = ["record", "--to", "run.modtrace", *options, "train.py", str(steps), f"store-{steps}", "2"]
        done = _run([sys.executable, "-m", "torch.distributed.run", *launch, *MODTRACE, *program], tmp_path)
        assert (done.returncode, done.stdout.count("trained")) == (0, 2)
        check(tmp_path / "run.modtrace", 2, steps=steps)
    shown = _run([*MODTRACE, "show", "run.modtrace"], tmp_path)
    assert (shown.returncode, "DistributedDataParallel" in shown.stdout) == (0, True)


def _run(command: Sequence[str], folder: Path) -> "subprocess.CompletedProcess[str]":
    """Runs a command, and ends all that it has started if it takes too long."""
    with subprocess.Popen(
        command,
        cwd=folder,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    ) as process:
        try:
            output, _ = process.communicate(timeout=TIMEOUT_S)
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
    return subprocess.CompletedProcess(command, process.returncode, output)
