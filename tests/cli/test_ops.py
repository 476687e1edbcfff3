"""`modtrace ops`."""

import json
import sys
from pathlib import Path

import pytest

from builders import RecordingBuilder
from helpers.command_line import Command
from modtrace.store.copy import write_recording


@pytest.fixture
def folder(tmp_path: Path) -> str:
    """A recording of two steps."""
    build = RecordingBuilder(argv=("train.py",), complete=True)
    net = build.module("", "Net")
    head = build.module("head", "Linear", parent=net)
    for step in range(2):
        start_ns = 10_000 * step
        build.step(step, start_ns, start_ns + 8_000)
        outer = build.call(net, start_ns, start_ns + 5_000, nth=0)
        call = build.call(head, start_ns, start_ns + 3_000, parent=outer, nth=0)
        build.op(call, "aten.addmm.default", start_ns, start_ns + 2_000 + step, flops=4_000)
        build.op(outer, "aten.relu.default", start_ns + 4_000, start_ns + 4_500)
        build.op(build.backward(call, start_ns + 6_000, start_ns + 7_000), "aten.mm.default", 0, 500)
    path = str(tmp_path / "run.modtrace")
    write_recording(build.data(), path)
    return path


def test_shows_the_modules_of_the_last_step(command: Command, folder: str) -> None:
    assert command("ops", folder).out == (
        "train.py\n"
        "step 1 (train), 8.00us; 2 steps recorded, 0 to 1\n"
        "\n"
        "module  type    ops    time      %  forward  backward  flops  GFLOP/s\n"
        "head    Linear    2  2.50us  83.3%   2.00us     500ns  4.00k     1.60\n"
        "Net     Net       1   500ns  16.7%    500ns\n"
        "all               3  3.00us          2.50us     500ns  4.00k     1.33\n"
        "\n"
        "all: 3.00us of 8.00us; the rest is Python between ops and recording them\n"
        "of a module: its own ops, without those of the modules inside it\n"
        "ops: how often ops were called\n"
        "%: of the time of all ops; flops: floating-point operations; empty where none are counted\n"
    )


def test_options_reach_the_table(command: Command, folder: str) -> None:
    options = ("--step", "0", "--by", "op", "--phase", "forward", "--top", "1")
    assert command("ops", folder, *options).out == (
        "train.py\n"
        "step 0 (train), 8.00us; 2 steps recorded, 0 to 1\n"
        "\n"
        "op                  most in  ops    time      %  flops  GFLOP/s\n"
        "aten.addmm.default  head       1  2.00us  80.0%  4.00k     2.00\n"
        "all                            2  2.50us         4.00k     1.60\n"
        "\n"
        "1 more row with 500ns (--top 2 shows all)\n"
        "ops: how often ops were called; most in: the module in which they took most time\n"
        "%: of the time of all ops; flops: floating-point operations; empty where none are counted\n"
    )


def test_json_is_the_table(command: Command, folder: str) -> None:
    found = json.loads(command("ops", folder, "--by", "call", "--json").out)
    assert [(row["name"], row["sums"]["together"]["ops"]) for row in found["rows"]] == [
        ("head", 2),
        ("Net", 1),
    ]


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        (("--step", "7"), "Invalid value for --step: no step 7 in this recording; there are: 0..1"),
        (("--by", "type"), "'type' is not one of 'module', 'op', 'call'"),
        (("--phase", "eval"), "'eval' is not one of 'forward', 'backward', 'recompute', 'optimizer'"),
        (("--top", "0"), "Invalid value for '--top': 0 is not in the range x>=1"),
    ],
)
def test_other_values_of_options_are_misuse(
    command: Command, folder: str, options: tuple[str, ...], expected: str
) -> None:
    assert expected in command("ops", folder, *options, code=2).err


def test_terminal_gets_a_screenful_of_rows_and_a_pipe_all(
    command: Command, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    build = RecordingBuilder(complete=True)
    net = build.module("", "Net")
    build.step(0, 0, 10_000)
    call = build.call(net, 0, 9_000)
    for number in range(60):
        build.op(call, f"aten.op{number}.default", 100 * number, 100 * number + 60 - number)
    write_recording(build.data(), tmp_path / "run.modtrace")
    run = str(tmp_path / "run.modtrace")
    piped = command("ops", run, "--by", "op").out
    assert piped.count("aten.op") == 60
    monkeypatch.setenv("NO_COLOR", "1")
    monkeypatch.setenv("LINES", "40")
    monkeypatch.setenv("COLUMNS", "100")
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True, raising=False)
    shown = command("ops", run, "--by", "op").out
    assert shown.count("aten.op") == 28
    assert "32 more rows with 528ns (--top 60 shows all)" in shown
