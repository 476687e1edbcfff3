"""`modtrace graph`, of a recording and of a model that a function makes."""

import json
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

from builders import RecordingBuilder, TypedRecording
from helpers.command_line import run_command
from helpers.programs import needs_program
from modtrace.store.copy import write_recording

MODELS = """
from torch import nn, zeros

def make():
    return nn.Sequential(nn.Linear(2, 3), nn.ReLU()), (zeros(1, 2),)

def make_wrong():
    return nn.Linear(2, 3), (zeros(1, 5),)
"""


class Ran(NamedTuple):
    code: int
    out: str
    err: str


Graph = Callable[..., Ran]


@pytest.fixture
def graph(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Graph:
    def run(*arguments: object) -> Ran:
        return Ran(run_command(monkeypatch, "graph", *map(str, arguments)), *capsys.readouterr())

    return run


def recording(*, ops: bool = True) -> TypedRecording:
    """Three alike blocks, one after the other, and a head that reads a parameter."""
    build = RecordingBuilder(argv=("train.py",), complete=True)
    net = build.module("", "Net")
    blocks = build.module("blocks", "ModuleList", parent=net)
    layers = [build.module(f"blocks.{at}", "Block", parent=blocks) for at in range(3)]
    head = build.module("head", "Linear", parent=net)
    build.step(0, 0, 8_000)
    outer = build.call(net, 0, 5_000, nth=0)
    calls = [
        build.call(each, 1_000 * at, 1_000 * at + 900, parent=outer, nth=0) for at, each in enumerate(layers)
    ]
    calls.append(build.call(head, 4_000, 4_900, parent=outer, nth=0))
    if not ops:
        return build.data()
    flows = build.tensor([2, 4], site=build.site(net, "input", "[0]"))
    for at, call in enumerate(calls):
        is_head = at == 3
        op = build.op(
            call, "aten.addmm.default" if is_head else "aten.relu.default", 1_000 * at, 1_000 * at + 800
        )
        build.use(flows, op=op, slot="self")
        if is_head:
            build.use(build.tensor([4, 4], site=build.site(head, "parameter", "weight")), op=op, slot="mat2")
        flows = build.tensor([2, 4], producer=op)
    build.use(flows, call=outer, slot="output")
    build.op(build.backward(outer, 6_000, 7_000), "aten.ones_like.default", 6_100, 6_200)
    return build.data()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write_recording(recording(), tmp_path / "run.modtrace")
    return tmp_path / "run.modtrace"


@pytest.fixture
def models(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """`models_of_graphs.py` in the current directory."""
    (tmp_path / "models_of_graphs.py").write_text(MODELS)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    yield
    sys.modules.pop("models_of_graphs", None)


def test_without_a_path_it_says_what_is_in_the_graph(folder: Path, graph: Graph) -> None:
    assert graph(folder, "--depth", 1) == Ran(
        0,
        "train.py\n"
        "step 0 (train), 8.00us; 1 step recorded\n"
        "2 layers, 1 input, 1 output; 3 edges\n"
        "draw it: -o FILE.svg\n",
        "",
    )


def test_modules_that_are_alike_are_folded_unless_asked_not_to(folder: Path, graph: Graph) -> None:
    assert graph(folder).out.splitlines()[-2] == "2 ops, 1 input, 1 output, 1 parameter; 4 edges"
    assert graph(folder, "--no-fold").out.splitlines()[-2] == "4 ops, 1 input, 1 output, 1 parameter; 6 edges"


def test_json_has_what_is_visible(folder: Path, graph: Graph) -> None:
    found = json.loads(graph(folder, "--collapse", "blocks.*", "--json").out)
    assert [(each["key"], each["repeats"]) for each in found["nodes"]] == [
        ("input:[0]", 1),
        ("forward/Net/blocks.0", 3),
        ("parameter:head.weight", 1),
        ("forward/Net/head/aten.addmm.default", 1),
        ("forward/output:output", 1),
    ]
    assert [(each["source"], each["target"], each["is_loop"]) for each in found["edges"]] == [
        (0, 1, False),
        (1, 3, False),
        (2, 3, False),
        (3, 4, False),
    ]
    assert [each["key"] for each in found["boxes"]] == [
        "forward/Net",
        "forward/Net/blocks",
        "forward/Net/head",
    ]


def test_dot_is_written_and_said(folder: Path, tmp_path: Path, graph: Graph) -> None:
    path = tmp_path / "model.dot"
    ran = graph(folder, "-o", path, "--depth", 1, "--phase", "forward")
    assert ran.out == f"{path}: 2 layers, 1 input, 1 output; 3 edges ({path.stat().st_size}B)\n".replace(
        f"{path.stat().st_size}B", ran.out.rpartition("(")[2].rstrip(")\n")
    )
    assert "head" in path.read_text() and "(Linear)" in path.read_text()


@pytest.mark.parametrize("suffix", [".svg", ".png"])
def test_pictures_are_drawn(folder: Path, tmp_path: Path, graph: Graph, suffix: str) -> None:
    needs_program("dot")
    path = tmp_path / f"model{suffix}"
    assert graph(folder, "-o", path, "--color", "time").code == 0
    assert path.read_bytes()[:4] == (b"\x89PNG" if suffix == ".png" else b"<?xm")


def test_layout_that_takes_long_is_told_of_before_it(
    folder: Path, tmp_path: Path, graph: Graph, monkeypatch: pytest.MonkeyPatch
) -> None:
    needs_program("dot")
    monkeypatch.setattr("modtrace.cli.graph._MOST_QUICK", 3)
    told = graph(folder, "-o", tmp_path / "model.svg", "--no-fold").err
    assert re.fullmatch(
        r"\d+ nodes may take graphviz minutes; --path, --phase and --op choose fewer\.\n", told
    )
    assert graph(folder, "-o", tmp_path / "model.dot", "--no-fold").err == ""


def test_graph_for_model_explorer_is_written(folder: Path, tmp_path: Path, graph: Graph) -> None:
    path = tmp_path / "model.json"
    told = json.loads(graph(folder, "-o", path, "--json").out)
    assert told == {"path": str(path), "size_bytes": path.stat().st_size, "nodes": 5, "edges": 4, "marks": []}


def test_recording_without_ops_is_drawn_and_it_is_said(tmp_path: Path, graph: Graph) -> None:
    write_recording(recording(ops=False), tmp_path / "run.modtrace")
    ran = graph(tmp_path / "run.modtrace", "-o", tmp_path / "model.dot", "--no-fold")
    assert ran.code == 0
    first, second = ran.out.splitlines()
    assert first.startswith(
        "no ops were recorded: the nodes are calls, and the arrows say which began next. "
    )
    assert second.startswith(f"{tmp_path / 'model.dot'}: 4 layers; 3 edges (")


def test_model_of_a_function_is_called_once(models: None, graph: Graph) -> None:
    assert (
        graph("models_of_graphs:make").out.splitlines()[-2]
        == "2 ops, 1 input, 1 output, 2 parameters; 5 edges"
    )


def test_model_that_raises_is_one_line_and_exit_code_2(models: None, graph: Graph) -> None:
    ran = graph("models_of_graphs:make_wrong")
    assert ran.code == 2
    [line] = ran.err.splitlines()
    assert line.startswith(
        "modtrace: error: models_of_graphs:make_wrong: calling the model raised RuntimeError: mat1 and mat2"
    )
    assert "write_guard.py" not in line and line.endswith("at its op aten.addmm.default")


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--depth", "-1"], "Invalid value for '--depth': -1 is not in the range x>=0"),
        (["--step", "7"], "Invalid value for --step: no step 7 in this recording; there are: 0"),
        (
            ["--collapse", "block"],
            "Invalid value for --collapse: collapse('block'): no module of this graph has such a path; the nearest",
        ),
        (
            ["--path", "bloks.1"],
            "Invalid value for --path: filter(path='bloks.1'): no module with ops of this step matches; the nearest",
        ),
        (["--op", "adm"], "Invalid value for --op: filter(op=('adm',)): no op of this step matches. Did you"),
        (
            ["-o", "model.bmp"],
            "Invalid value for --output: model.bmp: its name tells no format; it may end in ",
        ),
        (
            ["-o", "model.graphml"],
            "Invalid value for --output: model.graphml: GraphML is no longer written. docs/export.md (networkx) makes",
        ),
        (["-o", "model.json", "--color", "time"], "Invalid value for --color: .json has no colours"),
        (
            ["-o", "model.dot", "--color", "beauty"],
            "Invalid value for --color: color='beauty': nodes have no such",
        ),
        (["-o", "missing/model.dot"], "missing/model.dot: cannot be written: No such file or directory"),
    ],
)
def test_wrong_options_are_misuse(folder: Path, graph: Graph, arguments: list[str], said: str) -> None:
    ran = graph(folder, *arguments)
    assert ran.code == 2
    assert ran.err.startswith(f"modtrace: error: {said}")


@pytest.mark.parametrize(
    ("path", "layers"),
    [
        ("blocks", ["blocks", "blocks.0", "blocks.1", "blocks.2"]),
        ("blocks.1", ["blocks", "blocks.1"]),
        ("head", ["head"]),
        ("*", ["blocks", "blocks.0", "blocks.1", "blocks.2", "head"]),
    ],
)
def test_path_of_a_module_shows_it_with_its_inside(
    folder: Path, graph: Graph, path: str, layers: list[str]
) -> None:
    ran = graph(folder, "--path", path, "--no-fold", "--phase", "forward", "--json")
    assert ran.err == ""
    found = json.loads(ran.out)
    assert [each["key"] for each in found["boxes"]] == [
        *("forward/Net", *(f"forward/Net/{each}" for each in layers)),
    ]


def test_large_graph_is_drawn_at_a_depth_that_can_be_read(tmp_path: Path, graph: Graph) -> None:
    build = RecordingBuilder(complete=True)
    net = build.module("", "Net")
    many = build.module("many", "Many", parent=net)
    build.step(0, 0, 8_000)
    outer = build.call(net, 0, 5_000, nth=0)
    inner = build.call(many, 10, 4_000, parent=outer, nth=0)
    for at in range(300):
        build.tensor([2], producer=build.op(inner, "aten.zeros.default", 10 + at, 10 + at, nth=at))
    write_recording(build.data(), tmp_path / "run.modtrace")
    note, told = graph(tmp_path / "run.modtrace", "-o", tmp_path / "model.dot").out.splitlines()
    assert note == "at depth 1: the whole graph has 300 nodes; choose with --depth"
    assert ": 1 layer; 0 edges (" in told
