"""The lines of docs/ranks.md start ranks with a real launcher, and these write one recording."""

import os
import shlex
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from helpers.command_line import Command
from modtrace.store.reader import open_last_attempts

MODTRACE = f"{shlex.quote(sys.executable)} -m modtrace"
TORCHRUN = f"{shlex.quote(sys.executable)} -m torch.distributed.run --standalone --nproc-per-node 2"

#: The lines of the page, with two ranks, for this environment.
LINES = {
    "nproc": f"{MODTRACE} record --nproc 2",
    "torchrun --no-python": f"{TORCHRUN} --no-python {MODTRACE} record",
    "torchrun -m": f"{TORCHRUN} -m modtrace record",
    "accelerate": (
        f"{shlex.quote(sys.executable)} -m accelerate.commands.launch --multi_gpu --num_processes 2 "
        f"--main_process_port 29519 --no_python {MODTRACE} record"
    ),
}

#: Neither the ranks nor their optimizer matter here: torch takes seconds to import what they need.
TRAIN = """
import torch
model = torch.nn.Linear(2, 2)
for step in range(3):
    model(torch.ones(1, 2)).sum().backward()
    model.zero_grad()
print("trained", flush=True)
"""


def run(line: str, folder: Path, *arguments: str) -> "subprocess.CompletedProcess[str]":
    (folder / "train.py").write_text(TRAIN)
    foreign = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    environment = {name: value for name, value in os.environ.items() if name not in foreign}
    return subprocess.run(
        [*shlex.split(line), *arguments],
        cwd=folder,
        env={**environment, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )


#: The others start the same launcher or one like it, and their ranks the same command: `make soak` runs them.
SAMPLE = ("nproc",)


@pytest.mark.parametrize(
    "line",
    [
        pytest.param(line, id=name, marks=[] if name in SAMPLE else [pytest.mark.soak])
        for name, line in LINES.items()
    ],
)
def test_line_of_the_page_records_all_ranks(line: str, tmp_path: Path) -> None:
    if "accelerate" in line:
        pytest.importorskip("accelerate")
    ended = run(line, tmp_path, "--to", "run.modtrace", "train.py", "--nproc", "9", "--to", "x")
    assert ended.returncode == 0, ended.stderr
    assert not (tmp_path / "x").exists()
    assert ended.stdout.count("trained") == 2
    ranks = open_last_attempts(tmp_path / "run.modtrace")
    assert [(rank, data.table("steps").num_rows, data.meta.complete) for rank, data in ranks] == [
        (0, 3, True),
        (1, 3, True),
    ]
    told = [line for line in ended.stderr.splitlines() if line.startswith("modtrace: ")]
    assert sorted(line.split(" recorded")[0] for line in told) == ["modtrace: rank 0:", "modtrace: rank 1:"]
    assert sum("modtrace ranks run.modtrace" in line for line in told) == 1


def test_module_with_arguments_and_the_exit_code_are_passed_on(
    command: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A launcher that writes down its arguments stands for torch's, which the test above starts."""
    launcher = tmp_path / "launcher"
    launcher.write_text('#!/bin/sh\nprintf "%s " "$@" > "$0.arguments"\nexit 7\n')
    launcher.chmod(0o755)
    (tmp_path / "fails.py").touch()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "executable", str(launcher))
    command("record", "--nproc", "2", "-q", "-m", "fails", "--nproc", "9", "--to", "x", code=7)
    assert launcher.with_suffix(".arguments").read_text() == (
        "-m torch.distributed.run --standalone --nproc-per-node=2 "
        "-m -- modtrace record --to fails.modtrace -q -m fails --nproc 9 --to x "
    )


@pytest.mark.parametrize(
    ("given", "environment", "told"),
    [
        (["--nproc", "0"], {}, "'0': give the number of ranks, or gpu, cpu or auto."),
        (["--nproc=all"], {}, "'all': give the number of ranks, or gpu, cpu or auto."),
        (
            ["--nproc", "2"],
            {"RANK": "1"},
            "it starts ranks, and this process is one already (RANK=1). Leave it out.",
        ),
    ],
)
def test_what_cannot_be_started_is_told(
    given: Sequence[str],
    environment: dict[str, str],
    told: str,
    command: Command,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    (tmp_path / "train.py").write_text("")
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert told in command("record", *given, str(tmp_path / "train.py"), code=2).err
