"""`modtrace export` of graphs: to Model Explorer and as pictures."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from builders import RecordingBuilder
from helpers.command_line import run_command
from helpers.programs import needs_program
from modtrace.store.copy import write_recording

Export = Callable[..., tuple[int, str]]

NUMBERS = ["time_us", "flops", "bytes", "saved_bytes", "rms", "nonfinite"]


@pytest.fixture(autouse=True)
def in_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The current directory holds `run.modtrace`: two steps of a net, the second with a backward."""
    monkeypatch.chdir(tmp_path)
    build = RecordingBuilder(argv=("train.py",), complete=True)
    net = build.module("", "Net")
    head = build.module("head", "Linear", parent=net)
    weight = build.tensor([4, 4], site=build.site(head, "parameter", "weight"))
    for step in (0, 1):
        build.step(step, 1000 * step, 1000 * step + 900)
        outer = build.call(net, 1000 * step, 1000 * step + 400, nth=0)
        inner = build.call(head, 1000 * step + 10, 1000 * step + 300, parent=outer, nth=0)
        linear = build.op(inner, "aten.mm.default", 1000 * step + 20, 1000 * step + 30, flops=8)
        build.use(weight, op=linear)
        made = build.tensor([2, 4], producer=linear)
        build.use(made, op=build.op(outer, "aten.relu.default", 1000 * step + 310, 1000 * step + 320))
    back = build.backward(outer, 1500, 1800, nth=0)
    build.use(made, op=build.op(back, "aten.mm.default", 1600, 1610, forward=linear))
    write_recording(build.data(), "run.modtrace")


@pytest.fixture
def export(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Export:
    """Runs `modtrace export run.modtrace` with more arguments; gives its exit code and all that it said."""

    def run(*arguments: str) -> tuple[int, str]:
        code = run_command(monkeypatch, "export", "run.modtrace", *arguments)
        return code, "".join(capsys.readouterr())

    return run


def ids_in(path: str) -> list[str]:
    return [each["id"] for each in json.loads(Path(path).read_text())["graphs"][0]["nodes"]]


def test_graph_for_model_explorer_comes_with_its_numbers(export: Export) -> None:
    code, printed = export("-o", "net.json", "--json")
    assert code == 0
    files = ["net.json", *(f"net.{each}.json" for each in NUMBERS)]
    assert [each["path"] for each in json.loads(printed)["files"]] == files
    assert sorted(os.listdir()) == sorted([*files, "run.modtrace"])
    assert ids_in("net.json") == [
        "parameter:head.weight",
        "forward/Net/head/aten.mm.default",
        "forward/Net/aten.relu.default",
        "backward/Net/aten.mm.default",
    ]
    flops = json.loads(Path("net.flops.json").read_text())["net"]["results"]
    assert flops["forward/Net/head/aten.mm.default"] == {"value": 8}


def test_step_phase_and_depth_are_heeded(export: Export) -> None:
    assert export("-o", "first.json", "--step", "0")[0] == 0
    assert ids_in("first.json") == [
        "parameter:head.weight",
        "forward/Net/head/aten.mm.default",
        "forward/Net/aten.relu.default",
    ]
    assert export("-o", "shallow.json", "--depth", "1")[0] == 0
    assert ids_in("shallow.json")[0] == "forward/Net/head"
    assert export("-o", "forward.json", "--phase", "forward")[0] == 0
    assert ids_in("forward.json") == [
        "parameter:head.weight",
        "forward/Net/head/aten.mm.default",
        "forward/Net/aten.relu.default",
    ]


@pytest.mark.parametrize("arguments", [["-o", "net.graphml"], ["-o", "net", "--format", "graphml"]])
def test_graphml_is_refused_with_what_takes_its_place(arguments: list[str], export: Export) -> None:
    code, printed = export(*arguments)
    assert code == 2
    assert "GraphML is no longer written. docs/export.md (networkx) makes a networkx.DiGraph" in printed
    assert sorted(os.listdir()) == ["run.modtrace"]


def test_step_that_is_not_there_is_misuse(export: Export) -> None:
    code, printed = export("-o", "net.json", "--step", "7")
    assert code == 2
    assert "Invalid value for --step: no step 7" in printed and printed.count("\n") == 1
    assert not os.path.exists("net.json")


@pytest.mark.parametrize("name", ["net.json", "net.dot"])
def test_path_that_cannot_be_written_is_one_line(name: str, export: Export) -> None:
    code, printed = export("-o", f"gone/{name}")
    assert code == 2
    assert printed == (
        f"modtrace: error: gone/{name}: cannot be written: No such file or directory. Give another path.\n"
    )


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="there are no named pipes")
def test_what_is_no_file_gets_the_graph_alone(export: Export) -> None:
    os.mkfifo("pipe")
    reader = os.open("pipe", os.O_RDONLY | os.O_NONBLOCK)
    try:
        assert export("-o", "pipe", "--format", "model-explorer")[0] == 0
        assert json.loads(os.read(reader, 1_000_000))["label"] == "pipe"
    finally:
        os.close(reader)
    assert sorted(os.listdir()) == ["pipe", "run.modtrace"]


def test_pictures_are_those_of_modtrace_graph(export: Export) -> None:
    code, said = export("-o", "net.dot", "--depth", "1", "--phase", "forward")
    assert code == 0, said
    text = Path("net.dot").read_text()
    assert "head" in text and "aten.mm.default" not in text
    needs_program("dot")
    assert export("-o", "net.svg")[0] == 0
    assert Path("net.svg").read_text().startswith("<?xml")
    assert export("-o", "net.png")[0] == 0
    assert Path("net.png").read_bytes().startswith(b"\x89PNG")


def test_what_is_said_does_not_mix_with_what_goes_to_standard_output() -> None:
    program = "from modtrace.cli.main import main; main()"
    arguments = ["export", "run.modtrace", "--format", "dot", "-o", "/dev/stdout"]
    command = [sys.executable, "-c", program, *arguments]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.endswith("}\n")
    assert done.stderr == "wrote /dev/stdout (dot, no regular file)\n"
