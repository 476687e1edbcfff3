"""Measures how long questions about datasets of many rows take, and whether the answers are those that were planted.

    python benchmarks/datasets.py [--rows 1000000 10000000] [--engines duckdb spark] [--memory 8GB] [--folder DIR]
    python benchmarks/datasets.py --dataset runs.parquet     # the answers of both engines to one that exists

Each engine answers all questions in a process of its own; the times of a question are those of its first run, and the
memory is the most that it and its JVM had resident.
"""

import argparse
import json
import math
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import psutil

import modtrace
from modtrace.query.dataset import questions

sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))
from helpers.planted_dataset import PlantedRun

RANKS, MODULES = 32, 200


def main() -> None:
    options = _parse_arguments()
    if options.measure:
        print(json.dumps(measure(options.dataset, options.measure, options.memory)))
        return
    if options.dataset:
        _report(options.dataset, options.engines, options.memory, {})
        return
    for rows in options.rows:
        shape = PlantedRun(ranks=RANKS, modules=MODULES)
        run = PlantedRun(ranks=RANKS, modules=MODULES, steps=max(40, round(rows * shape.steps / shape.rows)))
        with tempfile.TemporaryDirectory(dir=options.folder) as folder:
            path = Path(folder) / "runs.parquet"
            start = time.perf_counter()
            run.write(path)
            took = time.perf_counter() - start
            files = [file.stat().st_size for file in path.rglob("*.parquet")]
            print(
                f"{run.rows:,} rows, {RANKS} ranks x {run.steps:,} steps: written in {took:.0f} s "
                f"({run.rows / took / 1e6:.2f} million rows/s), {len(files):,} files, {sum(files) / 1e6:,.0f} MB "
                f"({sum(files) / run.rows:.1f} bytes a row)",
                flush=True,
            )
            _report(str(path), options.engines, options.memory, run.answers())


def measure(path: str, engine: str, memory: str | None) -> dict[str, Any]:
    """Returns the times and the first rows of all answers, and the peak memory in MB, of this process."""
    start = time.perf_counter()
    with modtrace.open_dataset(path, engine, memory_limit=memory) as dataset:  # type: ignore[arg-type]
        took = {"(open)": time.perf_counter() - start}
        answers = {}
        for question in questions():
            start = time.perf_counter()
            answers[question] = dataset.ask(question).to_pylist()
            took[question] = time.perf_counter() - start
        peak = sum(
            map(_peak_mb, ["self", *(str(child.pid) for child in psutil.Process().children(recursive=True))])
        )
    return {"took": took, "answers": answers, "memory_mb": peak}


def _peak_mb(pid: str) -> float:
    try:
        status = Path(f"/proc/{pid}/status").read_text()
    except OSError:  # it has ended since
        return 0.0
    return sum(map(int, re.findall(r"VmHWM:\s+(\d+) kB", status))) / 1024


def _report(path: str, engines: list[str], memory: str | None, planted: dict[str, dict[str, Any]]) -> None:
    found = {engine: _in_new_process(path, engine, memory) for engine in engines}
    first = found[engines[0]]["answers"]
    for question, rows in first.items():
        expected = planted.get(question, {})
        assert not expected or expected.items() <= rows[0].items(), (question, rows[:1], expected)
        for engine in engines[1:]:
            assert are_same(found[engine]["answers"][question], rows), (question, engine)
    names = list(found[engines[0]]["took"])
    print(f"{'':<16} {'rows':>6} " + " ".join(f"{engine + ' s':>10}" for engine in engines))
    for name in names:
        rows = len(first.get(name, ()))
        print(
            f"{name:<16} {rows:>6} " + " ".join(f"{found[engine]['took'][name]:>10.2f}" for engine in engines)
        )
    print(f"{'memory, MB':<23} " + " ".join(f"{found[engine]['memory_mb']:>10,.0f}" for engine in engines))
    told = "the answers are those that were planted" if planted else "answers"
    print(f"{told}, and the same of {' and '.join(engines)}\n", flush=True)


def are_same(first: Any, second: Any) -> bool:
    """Returns whether two answers are equal, numbers within 1e-9."""
    if isinstance(first, float) and isinstance(second, float):
        return math.isclose(first, second, rel_tol=1e-9) or (math.isnan(first) and math.isnan(second))
    if isinstance(first, dict) and isinstance(second, dict):
        return first.keys() == second.keys() and all(are_same(first[name], second[name]) for name in first)
    if isinstance(first, list) and isinstance(second, list):
        return len(first) == len(second) and all(map(are_same, first, second))
    return bool(first == second)


def _in_new_process(path: str, engine: str, memory: str | None) -> dict[str, Any]:
    command = [sys.executable, __file__, "--dataset", path, "--measure", engine]
    done = subprocess.run(
        [*command, *(["--memory", memory] if memory else [])], stdout=subprocess.PIPE, text=True, check=True
    )
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def _parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--rows", type=lambda text: int(float(text)), nargs="+", default=[1_000_000, 10_000_000]
    )
    parser.add_argument("--engines", nargs="+", choices=["duckdb", "spark"], default=["duckdb"])
    parser.add_argument("--memory", default="8GB")
    parser.add_argument("--folder", type=Path, help="where datasets are written, and deleted")
    parser.add_argument("--dataset", help="an existing dataset, which is asked as it is")
    parser.add_argument("--measure", help=argparse.SUPPRESS)
    return parser.parse_args()


if __name__ == "__main__":
    main()
