"""`make bench` runs the parts that were chosen, and says which of them runs."""

from pathlib import Path

from helpers.benchmark_runs import run_benchmark


def test_part_that_is_not_there_is_answered_with_those_that_are() -> None:
    done = run_benchmark("all.py", "--only", "ops nope")
    assert (done.returncode, done.stdout) == (2, "")
    first, *parts, last = done.stderr.splitlines()
    assert first == "bench: there is no part 'nope'. The parts are:"
    assert [line.split()[0] for line in parts] == [
        "scopes",
        "values",
        "on_nonfinite",
        "collectives",
        "compiled",
        "captures",
        "tier2",
        "fingerprints",
        "tensors",
        "ops",
        "op_tracers",
        "graph",
        "report",
        "planted",
        "compare",
        "healthy_runs",
        "growth",
        "datasets",
        "open_large",
    ]
    assert last == "  all of them   about 104 min"


def test_help_lists_each_part_with_its_time_and_every_part_is_a_script() -> None:
    done = run_benchmark("all.py", "--only", "help")
    assert (done.returncode, done.stderr) == (0, "")
    assert "  ops           about  5 min   recording every op, beside torch's modes\n" in done.stdout
    folder = Path(__file__).parent.parent.parent / "benchmarks"
    assert all((folder / f"{line.split()[0]}.py").is_file() for line in done.stdout.splitlines()[:-1])


def test_chosen_parts_run_in_their_order_and_a_part_that_fails_stops_no_other(tmp_path: Path) -> None:
    (tmp_path / "ops.py").write_text("print('table of ops')\n")
    (tmp_path / "scopes.py").write_text("raise SystemExit(3)\n")
    done = run_benchmark(
        "-c",
        f"import all, pathlib, sys; all.FOLDER = pathlib.Path({str(tmp_path)!r}); "
        "sys.exit(all.main(['--only', 'ops,scopes']))",
    )
    assert (done.returncode, done.stdout) == (3, "table of ops\n")
    assert done.stderr.splitlines() == [
        "bench: 1 of 2: scopes (about 7 min): following the modules, beside torch's own trackers",
        "bench: scopes failed with exit code 3 after 0.0 min",
        "bench: 2 of 2: ops (about 5 min): recording every op, beside torch's modes",
        "bench: ops done after 0.0 min",
    ]


def test_rounds_are_told_beside_the_tables() -> None:
    code = "from measure import time_rounds; time_rounds({'plain': lambda: None}, rounds=2)"
    done = run_benchmark("-c", code)
    assert done.stdout == ""
    assert done.stderr.splitlines() == [
        "bench: round 1 of 2, 1 variants",
        "bench: round 2 of 2, 1 variants",
    ]
