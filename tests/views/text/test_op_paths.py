"""Ops with their modules, as text and JSON."""

import json
from dataclasses import replace

from golden import assert_golden
from modtrace.analysis.ops.op_paths import OpPath, OpPaths
from modtrace.analysis.tables.chosen_step import ShownStep
from modtrace.views.text.op_paths import render_modules, render_op_paths, render_op_paths_json

STEP = ShownStep(step=0, kind="train", start_ns=0, end_ns=200_000_000, first=0, last=0, count=1)
ROWS = (
    OpPath("aten.convolution.default", 0, "conv1", "conv1", 0, "Net", "Conv2d", "forward"),
    OpPath("aten.relu.default", 0, "relu", "relu", 0, "Net", "ReLU", "forward"),
    OpPath("aten.detach.default", 1, "relu", "relu", 0, "Net", "ReLU", "forward"),
    OpPath("aten.convolution.default", 0, "conv1@1", "conv1", 1, "Net", "Conv2d", "forward"),
    OpPath("aten.view.default", 0, "Net", "", 0, "Net", "Net", "forward"),
    OpPath("aten.mean.default", 0, "(outside of modules)", None, None, None, None, None),
)
PATHS = OpPaths(command=("train.py",), marks=(), step=STEP, phase=None, recorded=True, rows=ROWS)


def test_a_line_for_each_op() -> None:
    assert_golden("op_paths.txt", render_op_paths(PATHS))


def test_modules_alone_are_named_once_for_ops_in_a_row() -> None:
    assert render_modules(PATHS) == "conv1\nrelu\nconv1\nNet\n"


def test_modules_of_several_roots_are_named_with_them() -> None:
    other = OpPath("aten.relu.default", 0, "relu", "relu", 0, "Net#1", "ReLU", "forward")
    both = replace(PATHS, rows=(ROWS[1], other, ROWS[4]))
    assert render_modules(both) == "Net: relu\nNet#1: relu\nNet\n"
    assert render_op_paths(both).splitlines()[3].split() == ["op", "root", "module", "type", "phase"]


def test_ops_beyond_the_top_are_counted() -> None:
    lines = render_op_paths(PATHS, top=2).splitlines()
    assert [line.split()[0] for line in lines[4:6]] == ["aten.convolution.default", "aten.relu.default"]
    assert lines[-1] == "4 more ops"


def test_paths_without_ops_are_their_head() -> None:
    head = "train.py\nstep 0 (train), 200ms; 1 step recorded\n"
    assert render_op_paths(replace(PATHS, rows=(), phase="backward")) == head


def test_json_has_the_rows_and_the_modules() -> None:
    found = json.loads(render_op_paths_json(PATHS, top=1))
    assert found["rows"] == [
        {
            "op": "aten.convolution.default",
            "op_nth": 0,
            "name": "conv1",
            "path": "conv1",
            "call": 0,
            "root": "Net",
            "type": "Conv2d",
            "phase": "forward",
            "raised": False,
        }
    ]
    assert found["modules"] == ["conv1", "relu", "conv1", ""]
    assert found["step"]["step"] == 0


def test_narrow_terminal_tells_the_phases_by_lines_between_the_ops() -> None:
    backward = OpPath("aten.relu.default", 0, "relu", "relu", 0, "Net", "ReLU", "backward")
    text = render_op_paths(replace(PATHS, rows=(ROWS[1], backward, ROWS[5])), width=44)
    assert text.split("\n\n")[1] == (
        "op                   module\n"
        "forward:\n"
        "aten.relu.default    relu\n"
        "backward:\n"
        "aten.relu.default    relu\n"
        "outside of modules:\n"
        "aten.mean.default    (outside of modules)\n"
        "left out at a width of 44: type (a width of\n"
        "  55 shows all, and so does | less -S)\n"
    )
