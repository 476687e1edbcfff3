"""Each launcher tells a process its rank in variables of its own."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch.distributed as dist

from helpers.ranks import group_of_one
from modtrace.collect.recorder.launch import Launch, find_launch

NAMES = ("RANK", "WORLD_SIZE", "MASTER_", "TORCHELASTIC_", "SLURM_", "OMPI_", "PMI_", "PMIX_", "MV2_")


@pytest.fixture(autouse=True)
def _no_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in os.environ:
        if name.startswith(NAMES):
            monkeypatch.delenv(name)


BY_HAND = {"RANK": "1", "WORLD_SIZE": "4", "MASTER_ADDR": "node-0", "MASTER_PORT": "29500"}
PLAIN = {**BY_HAND, "TORCHELASTIC_RUN_ID": "none", "TORCHELASTIC_RESTART_COUNT": "0"}
SLURM = {"SLURM_JOB_ID": "77", "SLURM_PROCID": "1", "SLURM_NTASKS": "4"}
BATCH_SCRIPT = {"SLURM_JOB_ID": "77", "SLURM_PROCID": "0", "SLURM_NTASKS": "8"}


@pytest.mark.parametrize(
    ("variables", "expected"),
    [
        ({}, Launch()),
        (BY_HAND, Launch(1, 4, "node-0:29500", has_others=True)),
        (PLAIN, Launch(1, 4, "node-0:29500", has_others=True)),
        (
            {**PLAIN, "TORCHELASTIC_RESTART_COUNT": "2"},
            Launch(1, 4, "node-0:29500", attempt=2, has_others=True),
        ),
        ({**PLAIN, "TORCHELASTIC_RUN_ID": "a"}, Launch(1, 4, "torchrun a", run_id="a", has_others=True)),
        (
            {"RANK": "0", "WORLD_SIZE": "1", "TORCHELASTIC_RUN_ID": "a"},
            Launch(0, 1, "torchrun a", run_id="a"),
        ),
        (SLURM, Launch(1, 4, "SLURM_JOB_ID 77", has_others=True)),
        ({**SLURM, "SLURM_STEP_ID": "3"}, Launch(1, 4, "SLURM_JOB_ID 77.3", has_others=True)),
        ({**SLURM, **BY_HAND, "RANK": "2"}, Launch(2, 4, "node-0:29500", has_others=True)),
        (
            {
                "OMPI_COMM_WORLD_RANK": "1",
                "OMPI_COMM_WORLD_SIZE": "2",
                "PMIX_NAMESPACE": "a@1",
                **BATCH_SCRIPT,
            },
            Launch(1, 2, "PMIX_NAMESPACE a@1", has_others=True),
        ),
        (
            {"PMIX_RANK": "1", "PMIX_NAMESPACE": "slurm.77.0", **SLURM},
            Launch(1, 4, "PMIX_NAMESPACE slurm.77.0", has_others=True),
        ),
        ({"PMI_RANK": "1", "PMI_SIZE": "2"}, Launch(1, 2, "2 ranks", has_others=True)),
        (
            {"PMI_RANK": "1", "PMI_SIZE": "2", "MASTER_ADDR": "node-0", "MASTER_PORT": "1"},
            Launch(1, 2, "node-0:1", has_others=True),
        ),
        ({"MV2_COMM_WORLD_RANK": "1", "MV2_COMM_WORLD_SIZE": "2"}, Launch(1, 2, "2 ranks", has_others=True)),
        ({"RANK": "1"}, Launch(1, 1, "some ranks", has_others=True)),
        ({"RANK": "0", "WORLD_SIZE": "1"}, Launch()),
        ({"SLURM_JOB_ID": "77", "SLURM_PROCID": "0", "SLURM_NTASKS": "1"}, Launch()),
        ({"RANK": "first", "WORLD_SIZE": "4"}, Launch()),
    ],
)
def test_rank_is_that_of_the_launcher(
    variables: dict[str, str], expected: Launch, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert find_launch() == expected


def test_rank_is_that_of_torch_distributed_once_it_is_initialized(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RANK", "7")
    monkeypatch.setenv("WORLD_SIZE", "9")
    with group_of_one():
        assert find_launch() == Launch()
        monkeypatch.setattr(dist, "get_rank", lambda: 1)
        monkeypatch.setattr(dist, "get_world_size", lambda: 2)
        assert find_launch() == Launch(1, 2, "2 ranks", has_others=True)


SPAWN = """
import multiprocessing
import os

def ask():
    from modtrace.collect.recorder.launch import find_launch
    print(find_launch())
    os.environ.update({"RANK": "1", "WORLD_SIZE": "2"})
    print(find_launch())

if __name__ == "__main__":
    from modtrace.recording.process import name_process
    os.environ.update(SLURM_PROCID="2", SLURM_NTASKS="4", SLURM_JOB_ID="7")
    print(repr(name_process()), flush=True)
    process = multiprocessing.get_context("spawn").Process(target=ask)
    process.start()
    process.join()
"""


def test_spawned_child_has_no_rank_unless_it_is_told_one(tmp_path: Path) -> None:
    """The variables of Slurm and mpirun are those of the process that has spawned it."""
    script = tmp_path / "spawn.py"
    script.write_text(SPAWN)
    command = [sys.executable, str(script)]
    parent, first, second = subprocess.check_output(command, text=True, timeout=200).splitlines()
    assert first == str(Launch(name=parent.strip("'"), has_others=True))
    assert second == str(Launch(1, 2, "2 ranks", has_others=True))
