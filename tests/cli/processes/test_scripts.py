"""The kinds of loop that people write: recorded unedited they compute the same bits, and their steps are found."""

import os
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Sequence
from itertools import groupby
from pathlib import Path
from typing import Any, NamedTuple

import pytest

import modtrace
from helpers.command_ends import End, end_of_modtrace
from modtrace.recording.schema import schemas
from modtrace.recording.suggestions import count_of

SCRIPTS = Path(__file__).parents[2] / "scripts"


class Script(NamedTuple):
    """A program, and what is found in its recording: `4 x eval: Net` is four steps like this one after the other."""

    command: Sequence[str]
    steps: Sequence[str]


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
    "compiled model": Script(
        ["compiled.py"], ["2 x train: OptimizedModule, optimizer", "eval: OptimizedModule"] * 2
    ),
}


#: What is before the programs of one process: they find `results.py`, and say nothing but what they print.
BEFORE = f"""
import os, sys, warnings
sys.path.append({str(SCRIPTS)!r})
os.environ["CUDA_VISIBLE_DEVICES"] = ""
warnings.simplefilter("ignore")
"""

#: What the process runs instead of modtrace that is to run a script as `python` does.
UNRECORDED = "import runpy\ndel sys.argv[0]\nrunpy.run_path(sys.argv[0], run_name='__main__')\nsys.exit()\n"


def run(folder: Path, *script: str, is_recorded: bool) -> End:
    """Runs a script in a folder, with or without modtrace."""
    words = [str(SCRIPTS / script[0]), *script[1:]]
    if is_recorded:
        done = end_of_modtrace(folder, "record", "--to", "run.modtrace", *words, before=BEFORE)
    else:
        done = end_of_modtrace(folder, *words, before=BEFORE + UNRECORDED)
    assert done.status == 0, done.stderr
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


def check_closing_line(rec: Any, said: str) -> None:
    """The command ends by how many steps and rows the tables have, and by what else may be asked for."""
    kinds, rows = (
        Counter(rec.table("steps")["kind"].to_pylist()),
        sum(rec.table(name).num_rows for name in schemas()),
    )
    values, lines = rec.table("values"), said.splitlines()
    if any(rec.table("calls")["compiled"].to_pylist()):
        assert (
            lines.pop()
            == "modtrace: torch.compile hides modules from it: --compiled inside measures them too"
        )
    if any(values["nan_count"].to_pylist()):
        advice = "modtrace: it holds NaN or infinite values. Do they matter? modtrace nonfinite run.modtrace"
        assert lines.pop() == advice
    command = "ranks" if rec.meta.world_size > 1 else "show"
    steps = count_of(kinds.total(), "step")
    if len(kinds) > 1:
        train, evaluation = (
            count_of(kinds["train"], "training step"),
            count_of(kinds["eval"], "evaluation step"),
        )
        steps = f"{train} and {evaluation}"
    advice = (
        "" if rec.meta.rank else f" Look at it with: modtrace {command} run.modtrace"
    )  # once for all ranks
    assert re.sub(r"\d+\.\d MB", "SIZE MB", lines[-1]) == (
        f"modtrace: recorded {steps}, {rows:,} rows, SIZE MB.{advice}"
    )
    assert rec.meta.complete
    assert rec.meta.marks == ()


def check(script: Script, folder: Path) -> None:
    plain, recorded = folder / "plain", folder / "recorded"
    plain.mkdir()
    recorded.mkdir()
    expected = results(run(plain, *script.command, is_recorded=False).stdout)
    done = run(recorded, *script.command, is_recorded=True)
    assert results(done.stdout) == expected
    rec = modtrace.open_recording(recorded / "run.modtrace")
    assert found_steps(rec) == list(script.steps)
    check_closing_line(rec, done.stderr)


#: Those that `make test` runs.
IN_EVERY_RUN = {"GAN with two optimizers", "data loader with workers", "compiled model"}


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
    whole = results(run(tmp_path, "resume.py", is_recorded=False).stdout)
    run(tmp_path, "resume.py", "--resume", "state.pt", "--stop-after", "2", is_recorded=False)
    done = run(tmp_path, "resume.py", "--resume", "state.pt", is_recorded=True)
    assert results(done.stdout)[1] == whole[1]
    rec = modtrace.open_recording(tmp_path / "run.modtrace")
    assert found_steps(rec) == ["6 x train: Sequential, optimizer"]
    check_closing_line(rec, done.stderr)


@pytest.mark.soak
def test_trainer_of_transformers_with_checkpointing_is_recorded(tmp_path: Path) -> None:
    pytest.importorskip("accelerate")
    train = "2 x train: 2 x GPT2LMHeadModel, optimizer"
    check(Script(["checkpointing_trainer.py", "out"], [train, "2 x eval: GPT2LMHeadModel"] * 2), tmp_path)
    rec = modtrace.open_recording(tmp_path / "recorded" / "run.modtrace")
    recomputed = rec.table("calls").column("phase").to_pylist().count("recompute")
    assert recomputed == 4 * 2 * 2 * 11  # steps, micro-batches, blocks, and modules inside a block


RECORD = (sys.executable, "-m", "modtrace", "record", "--to", "run.modtrace")
TORCHRUN = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2")


def run_launcher(command: Sequence[str], folder: Path, how: str) -> "subprocess.CompletedProcess[str]":
    """Runs `ddp.py` in a folder."""
    words = [*command, str(SCRIPTS / "ddp.py"), how]
    environment = {**os.environ, "PYTHONPATH": str(SCRIPTS), "PYTHONWARNINGS": "ignore"}
    environment["CUDA_VISIBLE_DEVICES"] = ""
    done = subprocess.run(
        words, cwd=folder, env=environment, capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr
    return done


@pytest.mark.soak
def test_ranks_that_torchrun_starts_compute_the_same_bits_and_have_a_folder_each(tmp_path: Path) -> None:
    run_launcher(TORCHRUN, tmp_path, "plain")
    done = run_launcher((*TORCHRUN, "--no-python", *RECORD), tmp_path, "recorded")
    for rank in range(2):
        written = (tmp_path / f"recorded-{rank}.txt").read_text()
        assert results(written) == results((tmp_path / f"plain-{rank}.txt").read_text())
        rec = modtrace.open_recording(tmp_path / "run.modtrace" / f"rank-0000{rank}")
        assert found_steps(rec) == ["3 x train: DistributedDataParallel, optimizer", "eval: Sequential"] * 2
        check_closing_line(rec, said_at_the_end(done)[rank])


@pytest.mark.soak
def test_launcher_that_is_recorded_itself_says_that_its_ranks_are_not(tmp_path: Path) -> None:
    done = run_launcher((*RECORD, "-m", *TORCHRUN[2:]), tmp_path, "recorded")
    assert said_at_the_end(done) == [
        "modtrace: recorded nothing; no module was called in this process; "
        "not recorded: 2 Python processes that it started. run.modtrace is empty and can be deleted."
    ]


def said_at_the_end(done: "subprocess.CompletedProcess[str]") -> list[str]:
    """The closing lines of all ranks, by rank, without its number."""
    lines = sorted(line for line in done.stderr.splitlines() if ": recorded " in line)
    return [re.sub(r"^modtrace: rank \d+: ", "modtrace: ", line) for line in lines]
