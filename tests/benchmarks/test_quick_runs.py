"""Quick runs of the benchmarks print all of their rows; what the numbers are is nothing for a test."""

from importlib.util import find_spec

import pytest

from helpers.benchmark_runs import names_of, quick_lines, run_benchmark


@pytest.mark.soak
def test_benchmark_of_fingerprints() -> None:
    machine, *tables = quick_lines("fingerprints.py")
    assert machine.endswith(" kernel")
    assert [line.split("  ")[0] for line in tables if line and "us" not in line and "--" not in line] == [
        "float32, 1,000",
        "bfloat16, 1,000",
        "dense",
        "slice of columns",
        "every second",
        "transposed",
        "columns of 4 x as many",
        "columns, not aligned",
    ]


def test_benchmark_of_graphs() -> None:
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


@pytest.mark.soak
def test_benchmark_of_growth() -> None:
    rows = [line.split("  ")[0] for line in quick_lines("growth.py") if line]
    asked = ["record", "show", "ops", "memory", "nonfinite", "view"]
    fewer = ["record", "show", "nonfinite", "view"]
    assert rows == [
        *("calls of one module", *fewer),
        *("modules", *fewer),
        *("ops in one step", *asked),
        *("writes into one buffer", *asked),
        *("kept steps", *asked),
    ]


@pytest.mark.soak
def test_benchmark_of_scopes() -> None:
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


@pytest.mark.soak
def test_benchmark_of_whole_tensors() -> None:
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


@pytest.mark.soak
def test_benchmark_of_tier_2() -> None:
    machine, header, _, *rows = quick_lines("tier2.py")
    assert machine.startswith("torch ")
    assert header.split("  ")[-1].strip() == "ns an element"
    assert names_of(rows) == ["float32", "bfloat16", "float16", "float64"]


@pytest.mark.soak
def test_benchmark_of_values() -> None:
    machine, *tables = quick_lines("values.py")
    assert machine.endswith(" kernel")
    names = names_of(tables)
    assert names[2:6] == ["float32", "bfloat16", "float16", "float64"]
    assert names[-7:] == [
        "plain",
        "modtrace, calls alone",
        "modtrace, outputs and gradients",
        "modtrace, parameters too",
        "hooks taking std()",
        "hooks keeping copies",
        "torch DebugMode with hashes",
    ]


@pytest.mark.soak
def test_benchmark_of_captures() -> None:
    machine, header, _, *rows = quick_lines("captures.py")
    assert machine.startswith("torch ")
    assert header.split("  ")[-1].strip() == "95 %"
    assert names_of(rows) == [
        "plain",
        "tier 1 of all module, parameter and optimizer roles",
        "tier 1 of all those but updates",
        "tier 1 of op outputs",
        "what naming the op of a NaN needs: tier 1 of op outputs, no saved memory",
        "ops, no values",
        "tier 2 every 10th step",
        "tier 1, and tier 2 every 10th step",
        "hash and sketch of outputs, no statistics",
        "hash and sketch of outputs, tier 1",
        "idle",
        "calls alone",
        "whole tensors of one block, to disk",
        "hooks taking std()",
        "hooks keeping copies",
        "torch DebugMode with hashes",
    ]


@pytest.mark.soak
def test_benchmark_of_ops() -> None:
    machine, *tables = quick_lines("ops.py")
    assert machine.startswith("torch ")
    assert names_of(line for line in tables if line and "--" not in line and "ratio" not in line) == 5 * [
        "plain",
        "empty mode in Python",
        "empty mode in C",
        "torch DebugMode",
        "modtrace, ops, no saved",
        "modtrace, ops",
        "modtrace, ops and values",
    ]


@pytest.mark.soak
def test_benchmark_of_other_tracers() -> None:
    _, *tables = quick_lines("op_tracers.py")
    rows = [line for line in tables if line and "--" not in line and "ratio" not in line]
    assert names_of(rows) == 2 * ["plain", "modtrace, ops", "torchview", "torchviz", "torchlens"]
    for row, peer in zip(rows[2:5], ("torchview", "torchviz", "torchlens"), strict=True):
        assert row.count("not installed") == (0 if find_spec(peer) else 1)


@pytest.mark.soak
def test_benchmark_of_planted_mistakes() -> None:
    pytest.importorskip("transformers")
    machine, header, _, *rows = (line.split("  ") for line in quick_lines("planted.py"))
    cells = [[cell.strip() for cell in row if cell] for row in rows]
    assert machine[0].startswith("torch ")
    assert [each.strip() for each in header if each] == [
        "planted", "modtrace", "detect_anomaly", "DebugUnderflowOverflow", "DebugMode hashes",
    ]  # fmt: skip
    assert cells[:6] == [
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
    header, _, *by_tool = cells[6:]
    assert header == ["of 1 programs", "faults named", "faults told of", "false alarms"]
    assert by_tool == [
        ["modtrace", "1", "1", "0"],
        ["detect_anomaly", "-", "1", "0"],
        ["DebugUnderflowOverflow", "-", "1", "0"],
    ]


RECORDS_LESS = """
from op_rows import training_rows
from op_works import CASES

step = CASES["tiny"](True).training
row = training_rows(step._replace(ops=step.ops + 1))["modtrace, ops"]
row.run(row.counted)
"""


@pytest.mark.soak
def test_row_that_records_fewer_ops_than_ran_is_an_error() -> None:
    done = run_benchmark("-c", RECORDS_LESS)
    assert done.returncode == 1
    assert "ops ran: the benchmark times something else" in done.stderr


@pytest.mark.soak
def test_benchmark_of_healthy_runs() -> None:
    lines = quick_lines("healthy_runs.py")
    assert names_of(lines)[0] == "MLP, images, SGD"
    assert lines[-3].startswith("3 runs: 3 without a warning")
