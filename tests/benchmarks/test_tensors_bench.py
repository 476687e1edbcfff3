"""The benchmark of whole tensors runs and prints all of its rows; what the numbers are is nothing for a test."""

from helpers.benchmark_runs import names_of, quick_lines


def test_quick_run_prints_every_row() -> None:
    names = names_of(quick_lines("tensors.py")[1:])
    assert [name for name in names if not name.startswith("--")] == [
        "the training's thread, us a MiB",
        "numpy's copy",
        "put_tensor, alone",
        "put_tensor, while others are written",
        "to the disk, MB/s",
        "os.write",
        "whole tensors",
        "ratio",
        "memory, MiB",
        "32 tensors of 1 MiB",
    ]
