"""Where nodes, boxes and lines of views typed by hand stand, and what holds for any view."""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from helpers.layout_svg import render_layout
from helpers.typed_layouts import box, edge, node, view
from modtrace.analysis.graph.columns import PARAMETER, PHASE
from modtrace.analysis.graph_view.records import GraphView, ViewBox, ViewEdge, ViewNode
from modtrace.analysis.layout.layout import Layout, Rectangles, lay_out

WIDE, TALL = 100.0, 26.0


def square(_: ViewNode) -> tuple[float, float]:
    """All nodes of one size: exact coordinates are easy to check then."""
    return WIDE, TALL


def corners(found: Rectangles) -> list[tuple[float, float]]:
    """Left and top of each."""
    return list(zip(found.x.tolist(), found.y.tolist(), strict=True))


def lines(found: Layout) -> list[list[tuple[float, float]]]:
    """The points of every edge."""
    return [found.line(each) for each in range(len(found.first_point) - 1)]


# Views typed by hand.


def test_a_chain_is_one_straight_column() -> None:
    found = lay_out(view([node("a"), node("b"), node("c")], [edge(0, 1), edge(1, 2)]), size_of=square)
    assert corners(found.nodes) == [(-50, 0), (-50, 52), (-50, 104)]
    assert lines(found) == [[(0, 26), (0, 52)], [(0, 78), (0, 104)]]
    assert (found.left, found.top, found.width, found.height) == (-50, 0, 100, 130)


def test_nodes_of_different_width_are_in_one_column() -> None:
    widths = {"a": 40.0, "b": 120.0}
    found = lay_out(
        view([node("a"), node("b")], [edge(0, 1)]), size_of=lambda each: (widths[each.name], TALL)
    )
    assert corners(found.nodes) == [(-20, 0), (-60, 52)]
    assert lines(found) == [[(0, 26), (0, 52)]]


def test_a_skip_connection_runs_beside_the_chain() -> None:
    found = lay_out(
        view([node("a"), node("b"), node("c")], [edge(0, 1), edge(1, 2), edge(0, 2)]), size_of=square
    )
    assert corners(found.nodes) == [(-50, 0), (-50, 52), (-50, 104)]
    assert lines(found) == [
        [(0, 26), (0, 52)],
        [(0, 78), (0, 104)],
        [(10, 26), (57, 39), (57, 91), (10, 104)],
    ]


def test_a_diamond_has_two_columns_and_ends_in_the_first() -> None:
    found = lay_out(
        view(
            [node("a"), node("b"), node("c"), node("d")],
            [edge(0, 1), edge(0, 2), edge(1, 3), edge(2, 3)],
        ),
        size_of=square,
    )
    assert corners(found.nodes) == [(-50, 0), (-50, 52), (66, 52), (-50, 104)]
    assert lines(found) == [
        [(0, 26), (0, 52)],
        [(10, 26), (116, 52)],
        [(0, 78), (0, 104)],
        [(116, 78), (10, 104)],
    ]


def test_a_chain_goes_straight_through_boxes() -> None:
    nodes = [node("a"), node("b", box=1), node("c", box=1), node("d")]
    found = lay_out(
        view(nodes, [edge(0, 1), edge(1, 2), edge(2, 3)], [box("outer"), box("inner", box=0)]),
        size_of=square,
    )
    assert corners(found.nodes) == [(-50, 0), (-50, 112), (-50, 164), (-50, 240)]
    assert [x for line in lines(found) for x, _ in line] == [0.0] * 6
    assert corners(found.boxes) == [(-94, 52), (-82, 82)]
    assert (found.boxes.width.tolist(), found.boxes.height.tolist()) == ([188, 164], [162, 120])


def test_a_leaf_stands_just_above_its_first_reader_beside_the_chain() -> None:
    nodes = [node("a"), node("b"), node("c"), node("weight", kind=PARAMETER), node("mm"), node("later")]
    edges = [edge(0, 1), edge(1, 2), edge(2, 4), edge(3, 4), edge(4, 5), edge(3, 5)]
    found = lay_out(view(nodes, edges), size_of=square)
    assert corners(found.nodes)[2:5] == [(-50, 104), (66, 104), (-50, 156)]


def test_what_only_a_backward_reads_leaves_its_column_to_the_chain() -> None:
    boxes = [box("forward", kind=PHASE), box("backward", kind=PHASE, phase="backward")]
    nodes = [node("sdpa", box=0), node("detach", box=0), node("view", box=0), node("sdpa_backward", box=1)]
    found = lay_out(view(nodes, [edge(0, 1), edge(0, 2), edge(1, 3)], boxes), size_of=square)
    assert found.nodes.x[2] == found.nodes.x[0]
    assert found.nodes.y[1] == found.nodes.y[2]


def test_a_loop_goes_back_up_at_the_side_and_changes_no_place() -> None:
    nodes, edges = [node("a"), node("b")], [edge(0, 1)]
    plain = lay_out(view(nodes, edges), size_of=square)
    found = lay_out(view(nodes, [*edges, edge(1, 0, is_loop=True)]), size_of=square)
    assert corners(found.nodes) == corners(plain.nodes)
    assert found.line(1) == [(50, 65), (78, 65), (78, 13), (50, 13)]


def test_boxes_that_read_each_other_do_not_overlap_and_the_line_back_goes_up_at_the_side() -> None:
    nodes = [node("a", box=0), node("between"), node("b", box=0)]
    found = lay_out(view(nodes, [edge(0, 1), edge(1, 2)], [box("layers")]), size_of=square)
    assert corners(found.boxes) == [(-82, 0)]
    assert found.nodes.y.tolist() == [30, 94, 30]
    assert len(found.line(1)) == 4


def test_more_than_a_row_holds_goes_to_the_next_one() -> None:
    found = lay_out(view([node(str(each)) for each in range(30)]), size_of=square)
    assert sorted(set(found.nodes.y.tolist())) == [0, 52, 104]


def test_more_boxes_than_a_row_holds_go_to_the_next_one() -> None:
    boxes = [box(str(each)) for each in range(12)]
    found = lay_out(view([node("a", box=each) for each in range(12)], [], boxes), size_of=square)
    assert sorted(set(found.boxes.y.tolist())) == [0, 94]
    assert found.width == 1244


def phases() -> GraphView:
    boxes = [
        box("forward", kind=PHASE),
        box("forward net", box=0),
        box("backward", kind=PHASE, phase="backward"),
        box("net", box=2, phase="backward"),
        box("optimizer", kind=PHASE, phase="optimizer"),
    ]
    boxes[1] = boxes[1]._replace(name="net", path="net")
    nodes = [
        node("a", box=1),
        node("b", box=1),
        node("c", box=1),
        node("loss"),
        node("loss_backward", box=2, phase="backward", twin=3),
        node("c_backward", box=3, phase="backward", twin=2),
        node("b_backward", box=3, phase="backward", twin=1),
        node("a_backward", box=3, phase="backward", twin=0),
        node("add_", box=4, phase="optimizer"),
    ]
    chain = [edge(at, at + 1) for at in range(len(nodes) - 1)]
    return view(nodes, [*chain, edge(0, 7)], boxes)


def test_a_backward_goes_up_beside_its_forward_each_node_at_the_height_of_its_twin() -> None:
    found = lay_out(phases(), size_of=square)
    y = found.nodes.y.tolist()
    assert y[7] == y[0] < y[6] == y[1] < y[5] == y[2] < y[4]
    assert found.line(5) == [(found.nodes.x[5] + 50, y[5]), (found.nodes.x[5] + 50, y[6] + TALL)]


def test_phases_stand_side_by_side_and_a_loss_below_the_forward() -> None:
    found = lay_out(phases(), size_of=square)
    left, right = found.boxes.x, found.boxes.x + found.boxes.width
    assert right[0] < left[2] and right[2] < left[4]
    assert found.nodes.y[3] > found.boxes.y[0] + found.boxes.height[0]
    assert found.line(len(phases().edges) - 1) == [
        (found.nodes.x[0] + WIDE, found.nodes.y[0] + TALL / 2),
        (found.nodes.x[7], found.nodes.y[7] + TALL / 2),
    ]


def test_an_empty_view_is_a_point() -> None:
    found = lay_out(view([]))
    assert (found.left, found.top, found.width, found.height) == (0, 0, 0, 0)
    assert lines(found) == []


def test_a_box_with_nothing_in_it_has_room_for_its_title() -> None:
    found = lay_out(view([], boxes=[box("empty")]))
    assert (found.boxes.width.tolist(), found.boxes.height.tolist()) == ([164], [42])


@pytest.mark.parametrize("size", [(0.0, 10.0), (10.0, -1.0), (math.nan, 1.0), (math.inf, 1.0)])
def test_a_size_that_is_none_is_refused_with_the_node(size: tuple[float, float]) -> None:
    with pytest.raises(ValueError, match=r"relu: size_of gave .* Give a finite width and height above 0"):
        lay_out(view([node("relu")]), size_of=lambda _: size)


def test_a_longer_label_makes_a_wider_node() -> None:
    found = lay_out(view([node("a"), node("native_layer_norm"), node("a" * 90)]))
    assert found.nodes.width.tolist() == [48.0, pytest.approx(140.4), 240.0]


# What is deep or long.


def test_a_chain_of_5000_nodes_is_laid_out() -> None:
    size = 5000
    found = lay_out(
        view([node(str(each)) for each in range(size)], [edge(at, at + 1) for at in range(size - 1)]),
        size_of=square,
    )
    assert set(found.nodes.x.tolist()) == {-50}
    assert found.nodes.y.tolist() == [52.0 * at for at in range(size)]


def test_boxes_nested_5000_deep_are_laid_out() -> None:
    depth = 5000
    boxes = [box(str(at), box=at - 1) for at in range(depth)]
    nodes = [node("before"), node("inside", box=depth - 1), node("after")]
    found = lay_out(view(nodes, [edge(0, 1), edge(1, 2)], boxes), size_of=square)
    assert found.nodes.x.tolist() == [-50, -50, -50]
    assert found.boxes.x.tolist() == [-70.0 - 12 * (depth - at) for at in range(depth)]
    assert found.nodes.y.tolist() == [0, 52 + 30 * depth, 52 + 42 * depth + 26 + 26]


# What holds for any view.


@st.composite
def views(draw: st.DrawFn, *, is_nested_in_time: bool = True) -> GraphView:
    """A view with random boxes and edges from earlier to later nodes, some of them loops the other way.

    Args:
        is_nested_in_time: no box goes on after something that came after it.
    """
    nodes: list[ViewNode] = []
    boxes: list[ViewBox] = []
    edges: list[ViewEdge] = []
    open_boxes = [-1]
    for number in range(draw(st.integers(0, 24))):
        for _ in range(draw(st.integers(0, 2))):
            if is_nested_in_time and draw(st.booleans()) and len(open_boxes) > 1:
                open_boxes.pop()
            elif draw(st.booleans()):
                around = open_boxes[-1] if is_nested_in_time else draw(st.integers(-1, len(boxes) - 1))
                boxes.append(box(f"box{len(boxes)}", box=around))
                open_boxes.append(len(boxes) - 1)
        read = draw(st.sets(st.integers(0, number - 1), max_size=3)) if number else set()
        kind = PARAMETER if not read and draw(st.booleans()) else "op"
        within = open_boxes[-1] if is_nested_in_time else draw(st.integers(-1, len(boxes) - 1))
        nodes.append(node("n" * draw(st.integers(1, 30)), box=within, kind=kind))
        edges += [edge(each, number) for each in sorted(read)]
        if number and draw(st.integers(0, 5)) == 0:
            edges.append(edge(number, draw(st.integers(0, number)), is_loop=True))
    return view(nodes, edges, boxes)


def uneven(each: ViewNode) -> tuple[float, float]:
    """Sizes that differ in both directions."""
    return 10.0 + 9 * len(each.name), 8.0 + 13 * (len(each.name) % 7)


def overlapping(found: Layout, shown: GraphView) -> list[tuple[int, int]]:
    """The pairs of siblings of which one stands on the other: nodes, then boxes."""
    at = np.concatenate([[found.nodes.x, found.nodes.y], [found.boxes.x, found.boxes.y]], axis=1)
    size = np.concatenate(
        [[found.nodes.width, found.nodes.height], [found.boxes.width, found.boxes.height]], axis=1
    )
    around = np.array([each.box for each in (*shown.nodes, *shown.boxes)], np.int64)
    begin, end = at[:, :, None], (at + size)[:, :, None]
    apart = (end <= begin.transpose(0, 2, 1)) | (begin >= end.transpose(0, 2, 1))
    both = ~apart.any(axis=0) & (around[:, None] == around)
    return [(one, other) for one, other in np.argwhere(both).tolist() if one < other]


def outside_of_box(found: Layout, shown: GraphView) -> list[int]:
    """The nodes and boxes that are not wholly inside the box around them, below its title."""
    wrong = []
    for number, each in enumerate((*shown.nodes, *shown.boxes)):
        size = len(shown.nodes)
        of, at = (found.nodes, number) if number < size else (found.boxes, number - size)
        if each.box < 0:
            continue
        boxes, around = found.boxes, each.box
        right, bottom = of.x[at] + of.width[at], of.y[at] + of.height[at]
        is_inside = (
            of.x[at] >= boxes.x[around] + 12 - 1e-6
            and of.y[at] >= boxes.y[around] + 30 - 1e-6
            and right <= boxes.x[around] + boxes.width[around] - 12 + 1e-6
            and bottom <= boxes.y[around] + boxes.height[around] - 12 + 1e-6
        )
        if not is_inside:
            wrong.append(number)
    return wrong


@settings(deadline=None)
@given(views())
def test_every_edge_goes_down_the_page(shown: GraphView) -> None:
    found = lay_out(shown, size_of=uneven)
    nodes = found.nodes
    for number, each in enumerate(shown.edges):
        if not each.is_loop:
            assert nodes.y[each.target] >= nodes.y[each.source] + nodes.height[each.source]
            line = [y for _, y in found.line(number)]
            assert line == sorted(line)


@settings(deadline=None)
@given(st.booleans().flatmap(lambda nested: views(is_nested_in_time=nested)))
def test_siblings_do_not_overlap_and_children_are_inside(shown: GraphView) -> None:
    found = lay_out(shown, size_of=uneven)
    assert overlapping(found, shown) == []
    assert outside_of_box(found, shown) == []


@settings(deadline=None)
@given(st.booleans().flatmap(lambda nested: views(is_nested_in_time=nested)))
def test_all_is_finite_and_inside_of_the_picture(shown: GraphView) -> None:
    found = lay_out(shown, size_of=uneven)
    x, y = found.points[:, 0], found.points[:, 1]
    assert np.isfinite(found.points).all()
    assert all(len(each) >= 2 for each in lines(found))
    assert ((x >= found.left) & (x <= found.left + found.width)).all()
    assert ((y >= found.top) & (y <= found.top + found.height)).all()
    assert render_layout(shown, found).endswith("</svg>")


@settings(deadline=None)
@given(st.booleans().flatmap(lambda nested: views(is_nested_in_time=nested)))
def test_every_line_begins_and_ends_at_its_nodes(shown: GraphView) -> None:
    found = lay_out(shown, size_of=uneven)
    nodes = found.nodes
    for number, each in enumerate(shown.edges):
        for at, (x, y) in ((each.source, found.line(number)[0]), (each.target, found.line(number)[-1])):
            assert nodes.x[at] - 1e-6 <= x <= nodes.x[at] + nodes.width[at] + 1e-6
            assert nodes.y[at] - 1e-6 <= y <= nodes.y[at] + nodes.height[at] + 1e-6


@settings(deadline=None)
@given(views(is_nested_in_time=False))
def test_the_same_view_has_the_same_layout(shown: GraphView) -> None:
    one, other = lay_out(shown, size_of=uneven), lay_out(shown, size_of=uneven)
    assert corners(one.nodes) == corners(other.nodes) and lines(one) == lines(other)


@settings(deadline=None)
@given(views(), st.data())
def test_what_comes_at_the_end_moves_nothing(shown: GraphView, data: st.DataObject) -> None:
    """What it reads was read before, outside of all boxes around it: else a box gets wider for the line."""
    outermost = [_outermost_box(shown, each) for each in shown.nodes]
    sources = sorted(
        {
            each.source
            for each in shown.edges
            if not each.is_loop
            and (outermost[each.source] < 0 or outermost[each.source] != outermost[each.target])
        }
    )
    read = data.draw(st.sets(st.sampled_from(sources), max_size=3)) if sources else set()
    new = [edge(each, len(shown.nodes)) for each in sorted(read)]
    before = lay_out(shown, size_of=uneven)
    after = lay_out(view([*shown.nodes, node("new")], [*shown.edges, *new], shown.boxes), size_of=uneven)
    assert corners(after.nodes)[:-1] == corners(before.nodes)
    taken = {each.box for each in shown.nodes}  # no box of a real view is empty
    assert [corners(after.boxes)[each] for each in taken if each >= 0] == [
        corners(before.boxes)[each] for each in taken if each >= 0
    ]


@settings(deadline=None)
@given(views(), st.data())
def test_opening_the_last_layer_moves_nothing_before_it(shown: GraphView, data: st.DataObject) -> None:
    """A box around it that stands beside something may move aside as it grows, with all that is inside."""
    around = data.draw(st.sampled_from([-1, *_open_at_end(shown)]))
    size = len(shown.nodes)
    read = sorted(data.draw(st.sets(st.integers(0, size - 1), max_size=3))) if size else []
    edges = [*shown.edges, *(edge(each, size) for each in read)]
    closed = lay_out(view([*shown.nodes, node("new", box=around)], edges, shown.boxes), size_of=uneven)
    inside = [node(name, box=len(shown.boxes)) for name in ("new", "second", "third")]
    opened = lay_out(
        view(
            [*shown.nodes, *inside],
            [*edges, edge(size, size + 1), edge(size, size + 2)],
            [*shown.boxes, box("new", box=around)],
        ),
        size_of=uneven,
    )
    grown = _outermost_box(shown, node("new", box=around))
    still = [at for at in range(size) if grown < 0 or _outermost_box(shown, shown.nodes[at]) != grown]
    assert [corners(opened.nodes)[at] for at in still] == [corners(closed.nodes)[at] for at in still]
    assert opened.nodes.y.tolist()[:size] == closed.nodes.y.tolist()[:size]


def _open_at_end(shown: GraphView) -> list[int]:
    """The boxes around the last node."""
    found: list[int] = []
    at = shown.nodes[-1].box if shown.nodes else -1
    while at >= 0:
        found.append(at)
        at = shown.boxes[at].box
    return found


def _outermost_box(shown: GraphView, of: ViewNode) -> int:
    """The number of the box that lies in no other around a node; -1 for none."""
    found, at = -1, of.box
    while at >= 0:
        found, at = at, shown.boxes[at].box
    return found
