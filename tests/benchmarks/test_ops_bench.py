"""The benchmark of op recording runs and prints all of its rows; what the numbers are is nothing for a test."""

import re
from importlib.util import find_spec

import pytest

from helpers.benchmark_runs import names_of, quick_lines, run_benchmark

RECORDS_LESS = """
from op_rows import training_rows
from op_works import CASES

step = CASES["worst"](True).training
row = training_rows(step._replace(ops=step.ops + 1))["modtrace, ops"]
row.run(row.counted)
"""


@pytest.mark.soak
def test_quick_run_prints_every_row() -> None:
    machine, header, _, *rows = quick_lines("ops.py")
    assert machine.startswith("torch ")
    assert re.sub(r"\d+ ops \(\d+ in", "N ops (M in", " ".join(header.split())) == (
        "tiny GPT, N ops (M in forward): ratio 95 % GPT step, N ops (M in forward): ratio 95 %"
    )
    assert names_of(rows) == [
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
    done = run_benchmark("-c", RECORDS_LESS)
    assert done.returncode == 1
    assert "ops ran: the benchmark times something else" in done.stderr
