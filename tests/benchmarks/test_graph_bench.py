"""The benchmark of graphs runs and prints all of its rows; what the numbers are is nothing for a test."""

import subprocess
import sys
from pathlib import Path

BENCHMARKS = Path(__file__).parent.parent.parent / "benchmarks"


def test_quick_run_prints_every_row() -> None:
    command = [sys.executable, "graph.py", "--quick", "--repeats", "1"]
    done = subprocess.run(command, cwd=BENCHMARKS, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    head, *rows = done.stdout.splitlines()
    assert head == "2,002 nodes, 2,457 edges, 122 boxes"
    assert [row.split("  ")[0] for row in rows] == [
        "build",
        "fold",
        "view",
        "view, folded",
        "view, blocks collapsed",
        "without views",
        "layout",
        "DOT",
        "GraphML",
        "Model Explorer",
    ]
    assert all(row.endswith(" s") for row in rows)
