"""Colours by a number: who gets which, what is written, and that the colours can be told apart."""

import re
from typing import Any

import pytest

from golden import assert_golden
from helpers.drawn_views import box, edge, layer, leaf, op, view
from modtrace.analysis.graph.columns import PARAMETER
from modtrace.analysis.graph_view.records import GraphView, ViewNode
from modtrace.views.dot.color_scale import Scale, contrast, luminance, ramp_color, readable_on
from modtrace.views.dot.render import render_dot
from modtrace.views.dot.style import GraphStyle


def costs() -> GraphView:
    nodes = [
        leaf(PARAMETER, "weight", rms=0.5),
        op("mm", flops=1_000, duration_ns=2_000, bytes_read=600, bytes_written=400, box=0, rms=1.0),
        layer("block", "Block", ops=7, flops=4_000, duration_ns=50_000, saved_bytes=5_000_000, nonfinite=3),
        op("add", duration_ns=100),
    ]
    return view(nodes, [edge(0, 1), edge(1, 2)], [box("head", "Linear", ops=1, flops=1_000)])


def fills(text: str) -> list[str]:
    """The colour of each node, in order."""
    return re.findall(r'^ *n\d+ \[.*?fillcolor="([^"]*)"', text, re.MULTILINE)


def test_flops_are_as_they_were() -> None:
    assert_golden("flops.dot", render_dot(costs(), overlay="flops"))


@pytest.mark.parametrize(
    ("overlay", "written"),
    [
        ("time", ["2.00us", "50.0us", "100ns"]),
        ("flops", ["1.00k", "4.00k"]),
        ("bytes", ["1.00kB"]),
        ("saved", ["5.00MB"]),
        ("rms", ["0.500", "1.00"]),
        ("nonfinite", ["3"]),
        ("ops", ["1", "7", "1"]),
        ("bytes_read", ["600B"]),
    ],
)
def test_number_stands_on_each_node_of_which_it_is_known(overlay: str, written: list[str]) -> None:
    class Plain(GraphStyle):
        def node(self, node: ViewNode) -> dict[str, Any]:
            return {"label": node.label}

    text = render_dot(costs(), style=Plain(), overlay=overlay)
    nodes = "".join(sorted(re.findall(r"^ *(n\d+ \[.*\n)", text, re.MULTILINE)))
    assert re.findall(r"<td><b>([^<]*)</b></td>", nodes) == written


def test_node_without_the_number_is_white() -> None:
    text = render_dot(costs(), overlay="flops")
    nodes = sorted(re.findall(r'^ *(n\d+) \[.*?fillcolor="([^"]*)"', text, re.MULTILINE))
    assert [fill for _, fill in nodes] == ["#ffffff", "#fdf8d6", "#47175f", "#ffffff"]


def test_box_tells_its_number_and_keeps_its_colour() -> None:
    text = render_dot(costs(), overlay="flops")
    assert "label=<<b>head </b>(Linear) · 1.00k>" in text


def test_number_that_is_known_nowhere_is_told_to_be_so() -> None:
    text = render_dot(view([op("add")]), overlay="saved")
    assert "saved: not known of any node" in text
    assert fills(text) == ["#ffffff"]


@pytest.mark.parametrize("name", ["speed", "twin", "label", ""])
def test_unknown_number_names_those_there_are(name: str) -> None:
    with pytest.raises(ValueError) as raised:
        render_dot(costs(), overlay=name)
    assert str(raised.value) == (
        f"color={name!r}: nodes have no such number; there are: time, flops, bytes, saved, rms, nonfinite, "
        "duration_ns, bytes_read, bytes_written, saved_bytes, ops, repeats, call, start_ns"
    )


def test_scale_of_a_small_spread_has_equal_steps_and_of_a_large_one_equal_factors() -> None:
    assert [Scale.of([0, 5, 10]).position(each) for each in (0, 5, 10)] == [0.0, 0.5, 1.0]
    assert [round(Scale.of([1, 10_000]).position(each), 9) for each in (0, 1, 100, 10_000)] == [0, 0, 0.5, 1]


def test_numbers_that_are_all_the_same_or_not_finite_have_their_place() -> None:
    assert Scale.of([3, 3]).position(3) == 0.0
    assert Scale.of([1.0, 2.0]).position(float("nan")) == 1.0
    assert Scale.of([1.0, 2.0]).position(float("inf")) == 1.0


def test_ramp_gets_darker_all_the_way() -> None:
    lights = [luminance(ramp_color(at / 100)) for at in range(101)]
    assert lights == sorted(lights, reverse=True)
    assert ramp_color(0.0) == "#fdf8d6"
    assert ramp_color(1.0) == "#47175f"


def test_text_can_be_read_on_every_colour() -> None:
    """4.5 is what WCAG 2 asks for (AA)."""
    colors = [ramp_color(at / 100) for at in range(101)]
    assert min(contrast(luminance(each), luminance(readable_on(each))) for each in colors) > 4.5
