"""Pictures drawn by the program `dot`: any name and style comes out right, and what goes wrong says what to do."""

import os
import stat
import xml.etree.ElementTree as ElementTree
from pathlib import Path
from typing import Any

import pytest

from helpers.drawn_views import box, edge, layer, leaf, op, view
from helpers.programs import needs_program
from modtrace.analysis.graph.columns import INPUT
from modtrace.analysis.graph_view.records import GraphView, ViewNode
from modtrace.errors import MissingLibraryError, ModtraceError
from modtrace.views.dot.graphviz import raise_box_labels, render_svg, write_dot, write_png, write_svg
from modtrace.views.dot.render import render_dot
from modtrace.views.dot.style import GraphStyle

_SVG = "{http://www.w3.org/2000/svg}"
_LINK = "{http://www.w3.org/1999/xlink}"


def small() -> GraphView:
    nodes = [leaf(INPUT, "x", shape=(2, 8), dtype="float32"), layer("head", "Linear", box=0)]
    return view(nodes, [edge(0, 1, shape=(2, 8))], [box("Net", "Net")])


def texts(svg: str) -> list[str]:
    return ["".join(each.itertext()) for each in ElementTree.fromstring(svg).iter(f"{_SVG}text")]


def tooltips(svg: str) -> list[str]:
    return [each.attrib[f"{_LINK}title"] for each in ElementTree.fromstring(svg).iter(f"{_SVG}a")]


def test_svg_has_the_labels_and_tooltips_and_needs_no_other_file() -> None:
    needs_program("dot")
    svg = render_svg(small())
    assert sorted(texts(svg)) == ["2×8 float32", "Net (Net)", "head (Linear)", "input x"]
    assert sorted(tooltips(svg))[:2] == ["2×8", "Net\nclass: Net"]
    assert 'font-family="Helvetica,Arial,sans-serif"' in svg
    assert "<image" not in svg and "href=" not in svg.replace("xlink:href", "href")


@pytest.mark.parametrize(
    "name",
    [
        'say "hi"',
        "a\\b\\N\\",
        "<lambda>",
        "a<b>c</b>",
        "größe×層😀",
        "tab\there",
        "a-->b",
    ],
)
def test_any_name_is_drawn_as_it_is(name: str) -> None:
    needs_program("dot")

    class Plain(GraphStyle):
        def node(self, node: ViewNode) -> dict[str, Any]:
            return {"label": node.label, "tooltip": node.key}

    shown = view([op(name), layer(name, name, box=0)], [edge(0, 1, slot=name)], [box(name, name)])
    for style in (None, Plain()):
        svg = render_svg(shown, style=style)
        drawn = [each.replace("\N{NO-BREAK SPACE}", " ").strip() for each in texts(svg)]
        assert name.replace("\t", " ") in drawn
        assert any(each.startswith(name.replace("\t", " ")) for each in tooltips(svg))


def test_name_that_would_reorder_a_line_is_escaped() -> None:
    needs_program("dot")
    svg = render_svg(view([op("a\u202eb\u2066c\x9b")]))
    assert texts(svg) == [r"a\u202eb\u2066c\x9b"]
    assert not {*"\u202e\u2066\x9b"} & {*svg}


def test_name_with_control_characters_and_line_breaks_gives_a_picture() -> None:
    needs_program("dot")
    svg = render_svg(view([op("a\nb\x00\x1b\ud800")]))
    assert texts(svg) == ["a", "b\\x00\\x1b\\ud800"]


def test_labels_of_boxes_stand_behind_all_else() -> None:
    needs_program("dot")
    svg = render_svg(small())
    [raised] = ElementTree.fromstring(svg).findall(f"{_SVG}g/{_SVG}g[@class='box-labels']")
    assert ["".join(each.itertext()) for each in raised] == ["Net (Net)"]
    assert svg.index("box-labels") > svg.rindex('class="edge"')


def test_svg_that_looks_otherwise_is_left_as_it_is() -> None:
    assert raise_box_labels("<svg>another writer's</svg>") == "<svg>another writer's</svg>"


def test_picture_of_a_step_and_with_colours_can_be_drawn() -> None:
    needs_program("dot")
    nodes = [
        layer("a", "A", duration_ns=10),
        layer("a", "A", phase="backward", twin=0, duration_ns=30, raised=True, nonfinite=2),
    ]
    svg = render_svg(view(nodes, [edge(0, 1)], marks=("cut off",)), overlay="time")
    assert {"10ns", "30ns", "time", "cut off", " raised ", " 2 not finite "} <= set(texts(svg))


def test_files_are_written(tmp_path: Path) -> None:
    needs_program("dot")
    write_dot(small(), tmp_path / "a.dot")
    write_svg(small(), tmp_path / "a.svg")
    write_png(small(), tmp_path / "a.png", dpi=40)
    write_png(small(), tmp_path / "b.png", dpi=80)
    assert (tmp_path / "a.dot").read_text(encoding="utf-8") == render_dot(small())
    assert (tmp_path / "a.svg").read_text(encoding="utf-8") == render_svg(small())
    widths = [int.from_bytes((tmp_path / each).read_bytes()[16:20], "big") for each in ("a.png", "b.png")]
    assert widths[1] == pytest.approx(2 * widths[0], abs=2)
    assert sorted(each.name for each in tmp_path.iterdir()) == ["a.dot", "a.png", "a.svg", "b.png"]


@pytest.mark.parametrize("write", [write_dot, write_svg, write_png])
def test_file_that_cannot_be_written_is_named(write: Any, tmp_path: Path) -> None:
    needs_program("dot")
    path = tmp_path / "nowhere" / "a.svg"
    with pytest.raises(ModtraceError) as raised:
        write(small(), path)
    assert str(raised.value) == f"{path}: cannot be written: No such file or directory. Give another path."


@pytest.mark.parametrize("dpi", [0, -96])
def test_resolution_must_be_above_zero(dpi: int, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=f"dpi={dpi}: give the pixels of an inch"):
        write_png(small(), tmp_path / "a.png", dpi=dpi)


def test_missing_program_says_how_to_install_it(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(MissingLibraryError) as raised:
        render_svg(small())
    assert str(raised.value) == (
        "pictures are drawn by the program `dot`, which is not on PATH. Install Graphviz: "
        "`apt-get install graphviz`, `brew install graphviz`, `conda install graphviz` or `winget install graphviz`, "
        "and see that `dot` is found on PATH. Writing a .dot file needs no program."
    )
    write_dot(small(), tmp_path / "a.dot")


def fake_dot(folder: Path, script: str, monkeypatch: pytest.MonkeyPatch) -> None:
    program = folder / "dot"
    program.write_text(f"#!/bin/sh\n{script}\n", encoding="utf-8")
    program.chmod(program.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setenv("PATH", f"{folder}{os.pathsep}{os.environ['PATH']}")


def test_what_a_failing_program_says_is_passed_on(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    fake_dot(tmp_path, "cat > /dev/null; echo 'syntax error in line 1' >&2; exit 3", monkeypatch)
    with pytest.raises(ModtraceError, match="exit status 3 on a picture of 2 nodes: syntax error in line 1"):
        render_svg(small())


def test_program_that_fails_to_bend_edges_draws_straight_ones(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    fake_dot(tmp_path, 'cat > /dev/null; test "$2" = -Gsplines=line && echo "<svg>$*</svg>"', monkeypatch)
    assert render_svg(small()) == "<svg>-Tsvg -Gsplines=line</svg>\n"


def test_program_that_takes_too_long_is_ended_and_says_how_to_show_less(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    fake_dot(tmp_path, "exec sleep 60", monkeypatch)
    with pytest.raises(ModtraceError) as raised:
        render_svg(small(), patience_s=0.05)
    assert str(raised.value) == (
        "dot did not finish a picture of 2 nodes in 0.05 s. "
        "Show less: collapse(depth=...), fold(), filter(...) (--depth, --fold, --phase, --path); "
        "or write a .dot file and draw it with another program."
    )


def test_program_that_cannot_be_run_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    fake_dot(tmp_path, "", monkeypatch)
    (tmp_path / "dot").write_text("#!/no/such/shell\n", encoding="utf-8")
    with pytest.raises(
        ModtraceError, match=r"dot: the program cannot be run: No such file or directory\. Install Graphviz"
    ):
        render_svg(small())
