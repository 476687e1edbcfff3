"""The kinds of loop that people write: recorded unedited they compute the same bits, and their steps are found."""

import os
import re
import subprocess
import sys
from collections.abc import Sequence
from itertools import groupby
from pathlib import Path
from typing import Any, NamedTuple

import pytest

import modtrace
from modtrace.recording.schema import schemas

SCRIPTS = Path(__file__).parent.parent / "scripts"
MODTRACE = (sys.executable, "-c", "from modtrace.cli.main import main; main()")
RECORD = (*MODTRACE, "record", "--to", "run.modtrace")


class Script(NamedTuple):
    """A program, and what is found in its recording: `4 x eval: Net` is four steps like this one after the other."""

    command: Sequence[str]
    steps: Sequence[str]
    not_recorded: str = ""


ACCUMULATED = "3 x train: 3 x Language, optimizer"
SCRIPTS_OF_ONE_PROCESS = {
    "accumulation with evaluation in between": Script(
        ["accumulate.py"],
        [
            "4 x eval: Language",
            ACCUMULATED,
            "4 x eval: Language",
            ACCUMULATED,
            "4 x eval: Language",
            "train: 3 x Language, optimizer",
        ],
    ),
    "arguments, a scheduler, modules in a data loader": Script(
        ["workers.py", "--save-model", "net.pt"],
        ["3 x train: 8 x Sequential, Net, optimizer", "2 x eval: 6 x Sequential, Net"] * 2,
    ),
    "data loader with workers": Script(
        ["workers.py", "--workers", "2"], ["3 x train: Net, optimizer", "2 x eval: Net"] * 2
    ),
    "LBFGS with a closure": Script(
        ["lbfgs.py"],
        [f"train: optimizer, {', '.join(['Sequence, MSELoss'] * 4)}", "eval: Sequence, MSELoss"] * 3,
    ),
    "GAN with two optimizers": Script(
        ["gan.py"],
        [
            *[
                "train: Discriminator, BCELoss, Generator, Discriminator, BCELoss, optimizer",
                "train: Discriminator, BCELoss, optimizer",
            ]
            * 2,
            "eval: Generator",
        ]
        * 2,
    ),
    "half precision with a step that is skipped": Script(
        ["mixed_precision.py"],
        [
            "2 x train: Sequential, CrossEntropyLoss, optimizer",
            "train: Sequential, CrossEntropyLoss",
            "3 x train: Sequential, CrossEntropyLoss, optimizer",
        ],
    ),
    "REINFORCE": Script(["policy.py"], ["3 x train: 5 x Policy, optimizer"]),
    "actor and critic with long episodes": Script(
        ["policy.py", "--critic", "--moves", "300"], ["3 x train: 300 x Policy, optimizer"]
    ),
    "parameters updated by hand": Script(
        ["by_hand.py"], ["4 x train: Recurrent, NLLLoss", "2 x eval: Recurrent, NLLLoss"] * 2
    ),
    "compiled model": Script(
        ["compiled.py"], ["2 x train: OptimizedModule, optimizer", "eval: OptimizedModule"] * 2
    ),
    "module with a trainer and callbacks": Script(
        ["-m", "package.train"], ["3 x train: Sorter, optimizer", "4 x eval: Sorter"] * 2
    ),
}


def run(command: Sequence[str], folder: Path, *script: str) -> "subprocess.CompletedProcess[str]":
    """Runs a script, or `-m` and a module, in a folder."""
    found = [str(SCRIPTS / each) if each.endswith(".py") else each for each in script]
    environment = {
        **os.environ,
        "PYTHONPATH": str(SCRIPTS),
        "PYTHONWARNINGS": "ignore",
        "CUDA_VISIBLE_DEVICES": "",
    }
    done = subprocess.run(
        [*command, *found], cwd=folder, env=environment, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    return done


def results(printed: str) -> list[str]:
    """The losses, and the hash of the state: the last lines."""
    lines = printed.splitlines()[-2:]
    assert [line.split()[0] for line in lines] == ["losses", "state"]
    return lines


def found_steps(rec: Any) -> list[str]:
    """The steps of a recording, each with its kind, and with its root calls and optimizers in their order."""
    types = {row["module_id"]: row["type"] for row in rec.table("modules").to_pylist()}
    inside: dict[int, list[str]] = {step: [] for step in rec.table("steps").column("step").to_pylist()}
    for call in sorted(rec.table("calls").to_pylist(), key=lambda call: call["start_ns"]):
        if call["parent_call_id"] is None and call["phase"] in ("forward", "optimizer"):
            inside[call["step"]].append(types.get(call["module_id"], call["phase"]))
    steps = sorted(rec.table("steps").to_pylist(), key=lambda row: row["step"])
    assert [row["step"] for row in steps] == list(range(len(steps)))
    return counted([f"{row['kind']}: {', '.join(counted(inside[row['step']]))}" for row in steps])


def counted(names: Sequence[str]) -> list[str]:
    runs = [(name, len(list(same))) for name, same in groupby(names)]
    return [name if count == 1 else f"{count} x {name}" for name, count in runs]


def check_closing_line(rec: Any, said: str, not_recorded: str) -> None:
    """The command ends by how many steps and rows the tables have, and by what else may be asked for."""
    steps, rows = rec.table("steps").num_rows, sum(rec.table(name).num_rows for name in schemas())
    missing = f"; {not_recorded}" if not_recorded else ""
    values, lines = rec.table("values"), said.splitlines()
    if any(rec.table("calls")["compiled"].to_pylist()):
        assert (
            lines.pop()
            == "modtrace: torch.compile hides modules from it: --compiled inside measures them too"
        )
    if any(values["nan_count"].to_pylist()):
        advice = "modtrace: it holds NaN or infinite values. Do they matter? modtrace nonfinite run.modtrace"
        assert lines.pop() == advice
    assert re.sub(r"\d+\.\d MB", "SIZE MB", lines[-1]) == (
        f"modtrace: recorded {steps} steps, {rows:,} rows, SIZE MB{missing}. "
        "Look at it with: modtrace show run.modtrace"
    )
    assert rec.meta.complete
    assert rec.meta.marks == ()


def check(script: Script, folder: Path) -> None:
    plain, recorded = folder / "plain", folder / "recorded"
    plain.mkdir()
    recorded.mkdir()
    expected = results(run([sys.executable], plain, *script.command).stdout)
    done = run(RECORD, recorded, *script.command)
    assert results(done.stdout) == expected
    rec = modtrace.open_recording(recorded / "run.modtrace")
    assert found_steps(rec) == list(script.steps)
    check_closing_line(rec, done.stderr, script.not_recorded)


#: Those that `make test` runs: each is two processes.
IN_EVERY_RUN = {"GAN with two optimizers", "data loader with workers", "compiled model", "REINFORCE"}


@pytest.mark.parametrize(
    "script",
    [
        pytest.param(script, id=name, marks=() if name in IN_EVERY_RUN else pytest.mark.soak)
        for name, script in SCRIPTS_OF_ONE_PROCESS.items()
    ],
)
def test_script_computes_the_same_bits_and_its_steps_are_found(tmp_path: Path, script: Script) -> None:
    check(script, tmp_path)


def test_training_that_is_resumed_is_recorded_and_computes_what_it_would_have(tmp_path: Path) -> None:
    whole = results(run([sys.executable], tmp_path, "resume.py").stdout)
    run([sys.executable], tmp_path, "resume.py", "--resume", "state.pt", "--stop-after", "2")
    done = run(RECORD, tmp_path, "resume.py", "--resume", "state.pt")
    assert results(done.stdout)[1] == whole[1]
    rec = modtrace.open_recording(tmp_path / "run.modtrace")
    assert found_steps(rec) == ["6 x train: Sequential, optimizer"]
    check_closing_line(rec, done.stderr, "")


def test_spawned_trainers_are_told_and_what_the_starting_process_runs_is_recorded(tmp_path: Path) -> None:
    check(
        Script(
            ["spawned.py", "."],
            ["2 x eval: Sequential"],
            not_recorded="not recorded: 2 Python processes that it started",
        ),
        tmp_path,
    )


@pytest.mark.soak
def test_trainer_of_transformers_with_checkpointing_is_recorded(tmp_path: Path) -> None:
    pytest.importorskip("accelerate")
    train = "2 x train: 2 x GPT2LMHeadModel, optimizer"
    check(Script(["checkpointing_trainer.py", "out"], [train, "2 x eval: GPT2LMHeadModel"] * 2), tmp_path)
    rec = modtrace.open_recording(tmp_path / "recorded" / "run.modtrace")
    recomputed = rec.table("calls").column("phase").to_pylist().count("recompute")
    assert recomputed == 4 * 2 * 2 * 11  # steps, micro-batches, blocks, and modules inside a block


TORCHRUN = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2")


def test_ranks_that_torchrun_starts_compute_the_same_bits_and_have_a_folder_each(tmp_path: Path) -> None:
    run(TORCHRUN, tmp_path, "ddp.py", "plain")
    done = run((*TORCHRUN, "--no-python", *RECORD), tmp_path, "ddp.py", "recorded")
    for rank in range(2):
        written = (tmp_path / f"recorded-{rank}.txt").read_text()
        assert results(written) == results((tmp_path / f"plain-{rank}.txt").read_text())
        rec = modtrace.open_recording(tmp_path / "run.modtrace" / f"rank-0000{rank}")
        assert found_steps(rec) == ["3 x train: DistributedDataParallel, optimizer", "eval: Sequential"] * 2
        check_closing_line(rec, said_at_the_end(done)[rank], "")


@pytest.mark.soak
def test_launcher_that_is_recorded_itself_says_that_its_ranks_are_not(tmp_path: Path) -> None:
    done = run((*RECORD, "-m", *TORCHRUN[2:]), tmp_path, "ddp.py", "recorded")
    assert said_at_the_end(done) == [
        "modtrace: recorded nothing; no module was called in this process; "
        "not recorded: 2 Python processes that it started. run.modtrace is empty and can be deleted."
    ]


def said_at_the_end(done: "subprocess.CompletedProcess[str]") -> list[str]:
    return [line for line in done.stderr.splitlines() if line.startswith("modtrace: recorded ")]
