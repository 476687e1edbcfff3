"""The benchmark of op recording runs and prints all of its rows; what the numbers are is nothing for a test."""

import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

BENCHMARKS = Path(__file__).parent.parent.parent / "benchmarks"

RECORDS_LESS = """
from op_rows import training_rows
from op_works import CASES

step = CASES["worst"](True).training
row = training_rows(step._replace(ops=step.ops + 1))["modtrace, ops"]
row.run(row.counted)
"""


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, *arguments], cwd=BENCHMARKS, capture_output=True, text=True)


def test_quick_run_prints_every_row() -> None:
    done = run("ops.py", "--quick")
    assert done.returncode == 0, done.stderr
    machine, header, _, *rows = done.stdout.splitlines()
    assert machine.startswith("torch ")
    assert re.sub(r"\d+ ops \(\d+ in", "N ops (M in", " ".join(header.split())) == (
        "tiny GPT, N ops (M in forward): ratio 95 % GPT step, N ops (M in forward): ratio 95 %"
    )
    assert [row.split("  ")[0] for row in rows] == [
        "plain",
        "empty dispatch mode",
        "torch DebugMode",
        "torch DebugMode, modules too",
        "modtrace, calls alone",
        "modtrace, ops, shapes and edges",
        "modtrace, ops",
        "modtrace, ops and values",
        "forward: plain",
        "forward: modtrace, ops",
        "forward: torchview",
        "forward: torchviz",
        "forward: torchlens",
    ]
    for row, peer in zip(rows[-3:], ("torchview", "torchviz", "torchlens"), strict=True):
        assert row.count("not installed") == (0 if find_spec(peer) else 2)


def test_row_that_records_fewer_ops_than_ran_is_an_error() -> None:
    done = run("-c", RECORDS_LESS)
    assert done.returncode == 1
    assert "ops ran: the benchmark times something else" in done.stderr
