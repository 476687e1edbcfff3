"""`modtrace memory`."""

import json
from pathlib import Path

import pytest

from builders import RecordingBuilder
from helpers.command_line import Command
from modtrace.store.copy import write_recording


@pytest.fixture
def folder(tmp_path: Path) -> str:
    build = RecordingBuilder(argv=("train.py",), complete=True)
    net = build.module("", "Net")
    head = build.module("head", "Linear", parent=net)
    build.step(0, 0, 8_000)
    outer = build.call(net, 0, 5_000, nth=0)
    call = build.call(head, 0, 3_000, parent=outer, nth=0, allocated_bytes=2_000, peak_bytes=9_000)
    build.op(call, "aten.addmm.default", 0, 2_000, saved_bytes=3_000)
    build.op(outer, "aten.relu.default", 4_000, 4_500, saved_bytes=1_000)
    path = str(tmp_path / "run.modtrace")
    write_recording(build.data(), path)
    return path


def test_shows_what_modules_save(command: Command, folder: str) -> None:
    assert command("memory", folder).out == (
        "train.py\n"
        "step 0 (train), 8.00us; 1 step recorded\n"
        "\n"
        "module  type    ops   saved      %  inside  fwd alloc  fwd peak\n"
        "head    Linear    1  3.00kB  75.0%             2.00kB    9.00kB\n"
        "Net     Net       1  1.00kB  25.0%  4.00kB\n"
        "all               2  4.00kB\n"
        "\n"
        "saved: for backward, by a module's own ops; inside: with those of the modules inside it; "
        "%: of all that is saved\n"
        "alloc: all memory that one call of a module allocated, with the modules inside it; "
        "peak: the most that it held at a time; both of the call with most\n"
        "fwd: forward, bwd: backward, rec: recompute, opt: optimizer\n"
        "highest peak of a call: 9.00kB\n"
    )


def test_ops_stand_below_their_modules_when_asked_for(command: Command, folder: str) -> None:
    assert command("memory", folder, "--ops", "--top", "1", "--step", "0").out.splitlines()[4:8] == [
        "head                   Linear    1  3.00kB  75.0%     2.00kB    9.00kB",
        "   aten.addmm.default            1  3.00kB",
        "all                              2  4.00kB",
        "",
    ]


def test_json_is_the_table(command: Command, folder: str) -> None:
    found = json.loads(command("memory", folder, "--json").out)
    assert [(row["name"], row["saved"]["saved_bytes"]) for row in found["rows"]] == [
        ("head", 3000),
        ("Net", 1000),
    ]
    assert found["peak_bytes"] == 9000
