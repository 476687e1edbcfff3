"""The benchmark that follows `compare` counts each call into another file once."""

from pathlib import Path

import torch
from torch import nn

import modtrace
from helpers.benchmark_runs import run_benchmark


def test_each_stop_is_of_two_files_and_printed_once(tmp_path: Path) -> None:
    model = nn.Linear(2, 2)
    with modtrace.record(model, to=tmp_path / "run"):
        model(torch.ones(1, 2))
    done = run_benchmark("call_path.py", "--all", str(tmp_path / "run"), str(tmp_path / "run"))
    *stops, summary = done.stdout.splitlines()
    pairs = [stop.rsplit(":", 1)[0].split(" -> ") for stop in stops]
    assert all(caller != file for caller, file in pairs)
    assert len(stops) == len(set(stops))
    files = {file for pair in pairs for file in pair}
    assert summary.startswith(f"compare of two recordings: {len(stops)} stops in {len(files)} files of ")
