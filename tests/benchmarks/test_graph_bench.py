"""The benchmark of graphs runs and prints all of its rows; what the numbers are is nothing for a test."""

from helpers.benchmark_runs import names_of, quick_lines


def test_quick_run_prints_every_row() -> None:
    head, *rows = quick_lines("graph.py", "--repeats", "1")
    assert head == "2,002 nodes, 2,457 edges, 122 boxes"
    assert names_of(rows) == [
        "build",
        "fold",
        "view",
        "view, folded",
        "view, blocks collapsed",
        "without views",
        "DOT",
        "Model Explorer",
    ]
    assert all(row.endswith(" s") for row in rows)
