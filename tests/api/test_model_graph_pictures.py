"""How a `ModelGraph` shows itself, and which files it writes."""

import json
import re
import shutil
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import networkx
import pytest

from builders import RecordingBuilder
from helpers.programs import needs_program
from helpers.typed_steps import begin_net, given_to, record_training, run_op
from modtrace import ModtraceError
from modtrace.api.graph import graph_of
from modtrace.api.model_graph import ModelGraph
from modtrace.views.dot.style import GraphStyle


@pytest.fixture
def graph() -> ModelGraph:
    """A training step: two products, the loss, and the update."""
    return graph_of(record_training().data())


def test_text_says_which_step_and_how_much(graph: ModelGraph):
    assert str(graph) == (
        "step 0 (train), 1.00us; 1 step recorded\n5 ops, 1 input, 1 output, 1 parameter; 9 edges\n"
    )
    assert repr(graph) == "<ModelGraph: 8 nodes, 9 edges>"


def test_text_of_nothing_says_so():
    empty = graph_of(RecordingBuilder().data())
    assert repr(empty) == "<ModelGraph: 0 nodes, 0 edges>"
    assert "edge" not in str(empty)


def test_notebook_shows_the_picture_and_the_text(graph: ModelGraph):
    needs_program("dot")
    bundle = graph._repr_mimebundle_(include=None, exclude=None)
    assert [*bundle] == ["image/svg+xml", "text/plain"]
    assert ElementTree.fromstring(bundle["image/svg+xml"]).tag == "{http://www.w3.org/2000/svg}svg"
    assert bundle["text/plain"] == str(graph)


def test_notebook_shows_the_text_alone_where_there_is_no_dot(
    graph: ModelGraph, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(shutil, "which", lambda name: None)
    bundle = graph._repr_mimebundle_()
    assert [*bundle] == ["text/plain"]
    assert bundle["text/plain"].startswith(str(graph))
    assert "`dot`, which is not on PATH" in bundle["text/plain"]


def test_notebook_does_not_draw_what_is_large_unasked(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(ModelGraph, "render_svg", lambda self: pytest.fail("it was drawn"))
    build, _, outer = begin_net()
    for at in range(401):
        run_op(build, outer, "aten.zeros.default", at)
    bundle = graph_of(build.data())._repr_mimebundle_()
    assert [*bundle] == ["text/plain"]
    assert "(too large to be drawn unasked: collapse(depth=...), or write_svg)" in bundle["text/plain"]


def test_dot_is_written_as_it_is_rendered(graph: ModelGraph, tmp_path: Path):
    graph.write_dot(tmp_path / "step.dot", color="time")
    assert (tmp_path / "step.dot").read_text() == graph.render_dot(color="time")
    assert graph.render_dot(color="time") != graph.render_dot()


def test_svg_is_written_as_it_is_rendered(graph: ModelGraph, tmp_path: Path):
    needs_program("dot")
    graph.write_svg(tmp_path / "step.svg")
    assert (tmp_path / "step.svg").read_text() == graph.render_svg()


def test_png_has_the_pixels_of_an_inch_that_are_asked_for(graph: ModelGraph, tmp_path: Path):
    needs_program("dot")
    widths = []
    for dpi in (48, 96):
        graph.write_png(tmp_path / "step.png", dpi=dpi)
        content = (tmp_path / "step.png").read_bytes()
        assert content[:8] == b"\x89PNG\r\n\x1a\n"
        widths.append(int.from_bytes(content[16:20], "big"))
    assert widths[1] == pytest.approx(2 * widths[0], abs=2)


def test_lines_of_the_page_make_a_networkx_graph(graph: ModelGraph, tmp_path: Path):
    page = (Path(__file__).parents[2] / "docs" / "export.md").read_text(encoding="utf-8")
    [lines] = re.findall(r"## networkx\n.*?```python\n(.*?)```", page, re.DOTALL)
    names: dict[str, Any] = {"graph": graph, "networkx": networkx}
    exec(lines, names)
    network = names["network"]
    assert [*network] == [node.key for node in graph.nodes]
    assert network.number_of_edges() == len(graph.edges) == 9
    networkx.write_graphml(network, tmp_path / "step.graphml")
    assert networkx.read_graphml(tmp_path / "step.graphml").nodes == network.nodes


def test_graphml_is_refused_with_what_takes_its_place(graph: ModelGraph, tmp_path: Path):
    with pytest.raises(ModtraceError, match=r"docs/export\.md \(networkx\) makes a networkx\.DiGraph"):
        graph.write_graphml(tmp_path / "step.graphml")
    assert [*tmp_path.iterdir()] == []


def test_model_explorer_gets_every_node(graph: ModelGraph, tmp_path: Path):
    graph.write_model_explorer(tmp_path / "step.json")
    [collection] = json.loads((tmp_path / "step.json").read_text())["graphs"]
    assert len(collection["nodes"]) >= 8


def test_style_is_used_for_what_is_drawn(graph: ModelGraph):
    style = GraphStyle()
    assert graph.render_dot(style=style) == graph.render_dot()


def test_number_that_is_not_there_is_an_error(graph: ModelGraph, tmp_path: Path):
    with pytest.raises(ValueError, match="beauty"):
        graph.write_dot(tmp_path / "step.dot", color="beauty")
    assert [*tmp_path.iterdir()] == []


@pytest.mark.parametrize("write", ["write_dot", "write_model_explorer"])
def test_file_that_cannot_be_written_is_an_error(graph: ModelGraph, tmp_path: Path, write: str):
    with pytest.raises(ModtraceError, match=r"missing/step: cannot be written: No such file or directory"):
        getattr(graph, write)(tmp_path / "missing" / "step")


def test_choosing_gives_another_graph_and_leaves_the_first(graph: ModelGraph):
    before = graph.view
    for other in (
        graph.collapse(depth=0),
        graph.fold(),
        graph.with_tensors(),
        graph.without_views(),
        graph.filter(phase="forward"),
    ):
        assert other is not graph
    assert graph.view is before


def test_choices_hold_together_in_any_order():
    build, net, outer = begin_net()
    made = given_to(build, net)
    blocks = build.module("blocks", "ModuleList", parent=net)
    for at in range(3):
        block = build.call(
            build.module(f"blocks.{at}", "Block", parent=blocks), 10 * at, 10 * at + 9, parent=outer
        )
        made = run_op(build, block, "aten.relu.default", 10 * at + 1, made)
    graph = graph_of(build.data())
    one = graph.fold().with_tensors().collapse("blocks.*")
    assert one.view == graph.collapse("blocks.*").with_tensors().fold().view
    assert one.unfold().expand().view == graph.with_tensors().view
