"""What ops cost, as text and JSON: golden files for the whole, single rules below."""

import json
from dataclasses import replace

from golden import assert_golden
from modtrace.analysis.ops.op_table import OpRow, OpTable
from modtrace.analysis.ops.sums import OpSums, PhaseSums
from modtrace.analysis.tables.chosen_step import ShownStep
from modtrace.views.text.op_table import render_op_table, render_op_table_json

STEP = ShownStep(step=19, kind="train", start_ns=0, end_ns=200_000_000, first=0, last=19, count=20)
MATMULS = OpSums(ops=2, time_ns=4_000_000, flops=9_600_000_000, bytes_read=2_400_000, bytes_written=800_000)
TWICE = OpSums(ops=4, time_ns=8_000_000, flops=19_200_000_000, bytes_read=4_800_000, bytes_written=1_600_000)
ADAM = OpSums(ops=1, time_ns=1_000_000, flops_unknown=1, bytes_read=900_000, bytes_written=900_000)


def row(name: str, sums: PhaseSums, **more: object) -> OpRow:
    values = {
        "name": name,
        "root": "GPT",
        "path": name,
        "type": "Linear",
        "call": None,
        "call_step": None,
        "share": sums.together.time_ns / 10_000_000,
        "allocated_bytes": None,
        "busiest": None,
        "busiest_root": None,
        "busiest_ns": 0,
        "sums": sums,
    }
    return OpRow(**(values | more))  # type: ignore[arg-type]


BOTH_WAYS = PhaseSums(together=TWICE, forward=MATMULS, backward=MATMULS)


def table(*rows: OpRow, **more: object) -> OpTable:
    values = {
        "command": ("train.py", "--steps", "20"),
        "marks": (),
        "step": STEP,
        "by": "module",
        "phase": None,
        "recorded": True,
        "rows": rows,
        "sums": PhaseSums(
            together=replace(TWICE, ops=8, time_ns=10_000_000, flops_unknown=1),
            forward=MATMULS,
            backward=MATMULS,
            optimizer=ADAM,
        ),
    }
    return OpTable(**(values | more))  # type: ignore[arg-type]


def by_module() -> OpTable:
    outside = {"root": None, "path": None, "type": None}
    lone = PhaseSums(together=OpSums(ops=2, time_ns=30_000, raised=1, unfinished=1))
    return table(
        row("blocks.0.mlp", BOTH_WAYS, allocated_bytes=1_600_000),
        row("(optimizer)", PhaseSums(together=ADAM, optimizer=ADAM), **outside),
        row("GPT", PhaseSums(together=OpSums(ops=1, time_ns=500)), path="", type="GPT"),
        row("(outside of modules)", lone, **outside),
    )


def test_modules_with_their_phases_and_costs() -> None:
    assert_golden("op_table_modules.txt", render_op_table(by_module()))


def test_ops_say_in_which_module_most_of_their_time_goes() -> None:
    place = {"root": None, "path": None, "type": None}
    rows = (
        row("aten.addmm.default", BOTH_WAYS, busiest="blocks.0.mlp", busiest_root="GPT", **place),
        row("aten._fused_adam_.default", PhaseSums(together=ADAM), busiest="(optimizer)", **place),
    )
    assert_golden("op_table_ops.txt", render_op_table(table(*rows, by="op")))


def test_calls_tell_when_their_forward_was_in_another_step() -> None:
    sums = PhaseSums(together=OpSums(ops=1, time_ns=500), backward=OpSums(ops=1, time_ns=500))
    rows = (
        row("head@1", sums, path="head", call=1, call_step=19),
        row("head", sums, path="head", call=0, call_step=18),
    )
    lines = render_op_table(table(*rows, by="call")).splitlines()
    assert [line.split()[0] for line in lines[3:7]] == ["call", "head@1", "head", "all"]
    assert "forward in step" not in lines[4]
    assert lines[5].endswith("forward in step 18")


def test_root_has_a_column_where_there_are_several() -> None:
    rows = (
        row("head", BOTH_WAYS),
        row("head", BOTH_WAYS, root="GPT#1"),
    )
    assert render_op_table(table(*rows)).splitlines()[3].split()[:3] == ["module", "root", "type"]
    assert render_op_table(table(rows[0])).splitlines()[3].split()[:2] == ["module", "type"]


def test_busiest_module_is_told_with_its_root_where_there_are_several() -> None:
    rows = (
        row("a", BOTH_WAYS, busiest="head", busiest_root="GPT"),
        row("b", BOTH_WAYS, busiest="head", busiest_root="GPT#1"),
    )
    text = render_op_table(table(*rows, by="op"))
    assert "GPT: head" in text and "GPT#1: head" in text


def test_rows_beyond_the_top_are_counted() -> None:
    lines = render_op_table(by_module(), top=1).splitlines()
    assert [line.split()[0] for line in lines[3:6]] == ["module", "blocks.0.mlp", "all"]
    assert lines[7] == "3 more rows with 1.03ms"


def test_phases_have_no_columns_where_there_is_only_one() -> None:
    sums = PhaseSums(together=MATMULS, forward=MATMULS)
    title = render_op_table(table(row("head", sums), sums=sums)).splitlines()[3]
    assert title.split() == ["module", "type", "ops", "time", "%", "flops", "GFLOP/s", "read", "written"]


def test_narrow_terminal_keeps_name_and_time_and_names_what_it_leaves_out() -> None:
    assert render_op_table(by_module(), width=60).split("\n\n")[1:] == [
        "module                  time   flops\n"
        "blocks.0.mlp          8.00ms   19.2G\n"
        "(optimizer)           1.00ms       ?\n"
        "GPT                    500ns\n"
        "(outside of modules)  30.0us          raised 1x; end not seen 1x\n"
        "all                   10.0ms  19.2G+\n"
        "left out at a width of 60: type, ops, %, forward, backward,\n"
        "  optimizer, GFLOP/s, read, written, allocated (a width of\n"
        "  151 shows all, and so does | less -S)",
        "all: 10.0ms of 200ms; the rest is Python between ops and\n"
        "  recording them\n"
        "of a module: its own ops, without those of the modules\n"
        "  inside it\n"
        "flops: floating-point operations; empty where none are\n"
        "  counted\n"
        "+, ?: the sum leaves out ops of which the number is not\n"
        "  known\n",
    ]


def test_names_cannot_steer_the_terminal() -> None:
    assert "head\\x1b" in render_op_table(table(row("head\x1b", BOTH_WAYS)))


def test_table_without_rows_is_its_head() -> None:
    head = "train.py --steps 20\nstep 19 (train), 200ms; 20 steps recorded, 0 to 19\n"
    assert render_op_table(table(recorded=False)) == head
    assert render_op_table(table(command=(), step=None)) == "nothing was recorded\n"


def test_json_has_the_fields_and_as_many_rows_as_asked_for() -> None:
    found = json.loads(render_op_table_json(by_module(), top=1))
    assert (found["by"], found["step"]["step"], found["sums"]["together"]["ops"]) == ("module", 19, 8)
    [only] = found["rows"]
    assert (only["name"], only["allocated_bytes"]) == ("blocks.0.mlp", 1_600_000)
    assert only["sums"]["forward"] == {
        "ops": 2,
        "time_ns": 4_000_000,
        "flops": 9_600_000_000,
        "flops_unknown": 0,
        "bytes_read": 2_400_000,
        "bytes_written": 800_000,
        "bytes_unknown": 0,
        "unfinished": 0,
        "raised": 0,
        "over_steps": None,
    }
    assert len(json.loads(render_op_table_json(by_module()))["rows"]) == 4
