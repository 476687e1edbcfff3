"""The benchmark runs and prints all of its rows; what the numbers are is nothing for a test."""

from helpers.benchmark_runs import names_of, quick_lines


def test_quick_run_prints_every_row() -> None:
    machine, header, _, *rows = quick_lines("scopes.py")
    assert machine.startswith("torch ")
    assert header.split("  ")[-1].strip() == "95 %"
    assert names_of(rows) == [
        "plain",
        "two empty global hooks",
        "modtrace ModuleTracker",
        "modtrace ModuleTracker, 4 hooks",
        "torch ModuleTracker",
        "torch ModTracker",
        "torch ModTracker, 4 hooks",
        "modtrace.record",
        "modtrace.record and a tracker",
        "modtrace.record, backward times",
    ]
