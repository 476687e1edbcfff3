"""What modules save and allocate, as text and JSON."""

import json
from dataclasses import replace

from golden import assert_golden
from modtrace.analysis.ops.memory_table import CallMemory, MemoryRow, MemoryTable
from modtrace.analysis.ops.sums import SavedByOp, SavedMemory
from modtrace.analysis.tables.chosen_step import ShownStep
from modtrace.views.text.memory_table import render_memory_table, render_memory_table_json

STEP = ShownStep(step=4, kind="train", start_ns=0, end_ns=200_000_000, first=4, last=4, count=1)
MLP = SavedMemory(ops=4, saved_bytes=6_000_000, unknown=1)
NET = SavedMemory(ops=1, saved_bytes=2_000_000)
AGAIN = SavedMemory(ops=3, recompute_bytes=6_000_000)
LOSS = SavedMemory(ops=2)
ROWS = (
    MemoryRow(
        name="blocks.0",
        root="GPT",
        path="blocks.0",
        type="Block",
        saved=MLP,
        saved_inside=MLP,
        share=0.75,
        ops=(
            SavedByOp("aten.addmm.default", SavedMemory(ops=2, saved_bytes=6_000_000)),
            SavedByOp("aten.gelu.default", SavedMemory(ops=1, unknown=1)),
            SavedByOp("aten.view.default", SavedMemory(ops=1)),
        ),
        forward=CallMemory(calls=1, allocated_bytes=9_000_000, peak_bytes=12_000_000),
        backward=CallMemory(calls=1, allocated_bytes=3_000_000),
    ),
    MemoryRow(
        name="GPT",
        root="GPT",
        path="",
        type="GPT",
        saved=NET,
        saved_inside=SavedMemory(ops=8, saved_bytes=8_000_000, recompute_bytes=6_000_000, unknown=1),
        share=0.25,
    ),
    MemoryRow(
        name="blocks.1",
        root="GPT",
        path="blocks.1",
        type="Block",
        saved=AGAIN,
        saved_inside=AGAIN,
        share=0.0,
    ),
    MemoryRow(
        name="(outside of modules)",
        root=None,
        path=None,
        type=None,
        saved=LOSS,
        saved_inside=LOSS,
        share=0.0,
    ),
)
TABLE = MemoryTable(
    command=("train.py",),
    marks=("not closed: the process ended or is still running; complete to step 4",),
    step=STEP,
    recorded=True,
    rows=ROWS,
    saved=SavedMemory(ops=10, saved_bytes=8_000_000, recompute_bytes=6_000_000, unknown=1),
    peak_bytes=12_000_000,
)


def test_modules_with_the_ops_that_save() -> None:
    assert_golden("memory_table.txt", render_memory_table(TABLE))


def test_rows_beyond_the_top_are_counted() -> None:
    lines = render_memory_table(TABLE, top=1).splitlines()
    assert lines[5].split()[0] == "blocks.0"
    assert "3 more rows with 2.00MB saved" in lines


def test_root_has_a_column_where_there_are_several() -> None:
    other = replace(ROWS[0], root="GPT#1")
    title = render_memory_table(replace(TABLE, rows=(ROWS[0], other))).splitlines()[4]
    assert title.split()[:3] == ["module", "root", "type"]


def test_narrow_terminal_keeps_name_and_what_is_saved_and_names_what_it_leaves_out() -> None:
    assert render_memory_table(TABLE, width=50) == (
        "train.py\n"
        "step 4 (train), 200ms; 1 step recorded\n"
        "! not closed: the process ended or is still\n"
        "  running; complete to step 4\n"
        "\n"
        "module                 ops    saved  recomputed\n"
        "blocks.0                 4  6.00MB+\n"
        "   aten.addmm.default    2   6.00MB\n"
        "   aten.gelu.default     1        ?\n"
        "GPT                      1   2.00MB\n"
        "blocks.1                 3               6.00MB\n"
        "(outside of modules)     2\n"
        "all                     10  8.00MB+      6.00MB\n"
        "left out at a width of 50: type, %, inside, fwd\n"
        "  alloc, fwd peak, bwd alloc (a width of 102 shows\n"
        "  all, and so does | less -S)\n"
        "\n"
        "saved: for backward, by a module's own ops\n"
        "recomputed: saved in a recompute, until the\n"
        "  backward of that block has run\n"
        "highest peak of a call: 12.0MB\n"
        "+, ?: the sum leaves out ops of which it is not\n"
        "  known what they save\n"
    )


def test_table_without_ops_is_its_head() -> None:
    assert render_memory_table(replace(TABLE, recorded=False, rows=(), marks=())) == (
        "train.py\nstep 4 (train), 200ms; 1 step recorded\n"
    )


def test_json_has_the_fields_and_as_many_rows_as_asked_for() -> None:
    found = json.loads(render_memory_table_json(TABLE, top=1))
    assert found["saved"] == {"ops": 10, "saved_bytes": 8000000, "recompute_bytes": 6000000, "unknown": 1} | {
        "over_steps": None
    }
    [only] = found["rows"]
    assert only["forward"] == {"calls": 1, "allocated_bytes": 9000000, "peak_bytes": 12000000} | {
        "allocated_over_steps": None,
        "peak_over_steps": None,
    }
    assert only["ops"][0]["op"] == "aten.addmm.default"
