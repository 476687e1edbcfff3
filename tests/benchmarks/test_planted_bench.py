"""The benchmark of planted mistakes runs, and ours is right about what it is asked."""

import pytest

from helpers.benchmark_runs import quick_lines

pytest.importorskip("transformers")


@pytest.mark.soak
def test_quick_run_tells_what_every_tool_says_of_a_mistake_and_of_a_healthy_model() -> None:
    machine, header, _, *rows = (line.split("  ") for line in quick_lines("planted.py"))
    cells = [[cell.strip() for cell in row if cell] for row in rows]
    assert machine[0].startswith("torch ")
    assert [each.strip() for each in header if each] == [
        "planted", "modtrace", "detect_anomaly", "DebugUnderflowOverflow", "DebugMode hashes",
    ]  # fmt: skip
    assert cells == [
        [
            "fully masked row",
            "exactly",
            "wrongly: LogSoftmaxBackward0",
            "wrongly: blocks.1.attn.proj",
            "wrongly: masked_fill in blocks.0.attn",
        ],
        ["healthy", "silent", "silent", "silent", "false alarm: masked_fill in blocks.0.attn"],
        ["named exactly, of 1", "1", "0", "0", "0"],
        ["named wrongly, of 1", "0", "1", "1", "1"],
        ["silent, of 1", "0", "0", "0", "0"],
        ["false alarms, of 1", "0", "0", "0", "1"],
    ]
