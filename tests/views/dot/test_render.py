"""Pictures as text: what stands in it, which edges place nodes, and any name and size."""

from typing import Any

from golden import assert_golden
from helpers.drawn_views import box, edge, layer, leaf, op, phase_box, view
from modtrace.analysis.graph.columns import INPUT, NEXT, OUTPUT, PARAMETER
from modtrace.analysis.graph_view.records import GraphView, ViewEdge, ViewNode
from modtrace.views.dot.render import render_dot
from modtrace.views.dot.style import GraphStyle


class Bare(GraphStyle):
    """Only what tests are about: labels, and the structure that the writer adds."""

    def graph(self, view: GraphView) -> dict[str, Any]:
        return {}

    def all_nodes(self) -> dict[str, Any]:
        return {}

    def all_edges(self) -> dict[str, Any]:
        return {}

    def node(self, node: ViewNode) -> dict[str, Any]:
        return {"label": node.label}

    def box(self, box: Any) -> dict[str, Any]:
        return {"label": box.label}

    def edge(self, edge: ViewEdge, source: ViewNode, target: ViewNode) -> dict[str, Any]:
        return {}


def network() -> GraphView:
    """A forward: a closed layer that is called a second time, three alike in one, and a linear layer's inside."""
    return view(
        [
            leaf(INPUT, "x", shape=(2, 8), dtype="float32"),
            layer("embed", "Embedding", box=0, call=1, ops=3, duration_ns=1_230_000, flops=45_600),
            layer("blocks.0", "Block", box=0, repeats=3, ops=9, saved_bytes=1_500, nonfinite=2),
            leaf(PARAMETER, "weight", box=1, shape=(4, 8), dtype="float32"),
            op("addmm", box=1, shape=(2, 4), dtype="float32", args='{"self":"$self"}', rms=0.5),
            leaf(OUTPUT, "output", phase="forward", shape=(2, 4), dtype="float32"),
        ],
        [
            edge(0, 1, slot="indices", shape=(2, 8), dtype="float32"),
            edge(1, 2, slot="input", shape=(2, 8), dtype="float32", reads=2),
            edge(2, 4, slot="mat1", shape=(2, 8), dtype="float32"),
            edge(3, 4, slot="mat2", shape=(4, 8), dtype="float32"),
            edge(4, 5, slot="output", shape=(2, 4), dtype="float32"),
        ],
        [box("Net", "Net"), box("head", "Linear", box=0)],
    )


def whole_step() -> GraphView:
    """Two blocks forward, loss, backward with the recompute of one block, and the optimizer."""
    return view(
        [
            leaf(INPUT, "x", box=0),
            layer("a", "Block", box=0),
            layer("b", "Block", box=0),
            op("loss", phase=None),
            layer("b", "Block", box=1, phase="backward", twin=2),
            layer("a", "Block", box=2, phase="recompute", twin=1),
            layer("a", "Block", box=1, phase="backward", twin=1),
            layer("(optimizer)", "", box=3, phase="optimizer"),
        ],
        [
            edge(0, 1),
            edge(1, 2),
            edge(2, 3),
            edge(3, 4),
            edge(1, 4),
            edge(0, 5),
            edge(4, 6),
            edge(5, 6, is_loop=True),
            edge(1, 7),
            edge(2, 7),
            edge(4, 7),
            edge(6, 7),
        ],
        [phase_box(each) for each in ("forward", "backward", "recompute", "optimizer")],
    )


def body(text: str) -> list[str]:
    """The lines behind the defaults, without their indentation."""
    return [line.strip() for line in text.splitlines()[4:-1]]


def test_network_is_as_it_was() -> None:
    assert_golden("network.dot", render_dot(network()))


def test_whole_step_is_as_it_was() -> None:
    assert_golden("whole_step.dot", render_dot(whole_step(), style=Bare()))


def test_picture_of_nothing_is_a_picture() -> None:
    assert render_dot(view([]), style=Bare()).splitlines()[0::5] == ["digraph modtrace {"]


def test_edges_stand_in_the_order_of_time_and_nodes_are_numbered_in_it() -> None:
    text = render_dot(view([op("a"), op("b"), op("c")], [edge(0, 2), edge(1, 2), edge(0, 1)]), style=Bare())
    assert body(text) == [
        'n0 [label="a"]',
        'n1 [label="b"]',
        'n2 [label="c"]',
        "n0 -> n2",
        "n1 -> n2",
        "n0 -> n1",
    ]


def test_loops_place_no_node() -> None:
    text = render_dot(view([op("a"), op("b")], [edge(0, 1), edge(1, 0, is_loop=True)]), style=Bare())
    assert body(text)[2:] == ["n0 -> n1", 'n1 -> n0 [constraint="false"]']


def test_box_with_a_parameter_stands_below_what_it_reads_and_not_beside_it() -> None:
    nodes = [op("relu"), leaf(PARAMETER, "weight", box=0), op("mm", box=0)]
    text = render_dot(view(nodes, [edge(0, 2), edge(1, 2)], [box("head", "Linear")]), style=Bare())
    assert body(text)[-2:] == ['n0 -> n2 [minlen="2"]', "n1 -> n2"]


def test_backward_alone_runs_downward() -> None:
    nodes = [op("a", phase="backward"), op("b", phase="backward")]
    assert body(render_dot(view(nodes, [edge(0, 1)]), style=Bare()))[-1] == "n0 -> n1"


def test_edge_of_the_backward_is_written_backward_with_its_ends_swapped() -> None:
    class Ends(Bare):
        def edge(self, edge: ViewEdge, source: ViewNode, target: ViewNode) -> dict[str, Any]:
            return {"arrowhead": "vee", "taillabel": "grad"}

    nodes = [op("a"), op("b", phase="backward"), op("c", phase="backward")]
    assert body(render_dot(view(nodes, [edge(1, 2)]), style=Ends()))[-1] == (
        'n2 -> n1 [dir="back" arrowtail="vee" headlabel="grad"]'
    )


def test_backward_beside_its_forward_only_where_that_turns_no_edge() -> None:
    # The second backward goes back to what came later in the forward: in line, an edge would lead downward.
    nodes = [
        op("a"),
        op("b"),
        op("a2", phase="backward", twin=0),
        op("b2", phase="backward", twin=1),
    ]
    rows = [line for line in body(render_dot(view(nodes), style=Bare())) if "rank=same" in line]
    assert rows == ["{ rank=same; n0; n2 }"]


def test_gradient_that_only_the_optimizer_reads_is_held_by_what_it_is_made_of() -> None:
    nodes = [op("x"), op("loss", phase=None), op("mm", phase="backward"), op("step", phase="optimizer")]
    edges = [edge(0, 1), edge(0, 2), edge(1, 2), edge(2, 3)]
    assert body(render_dot(view(nodes, edges), style=Bare()))[-4:] == [
        "n0 -> n1",
        'n0 -> n2 [constraint="false"]',
        'n2 -> n1 [dir="back"]',
        'n3 -> n2 [dir="back"]',
    ]


def test_what_ran_outside_of_all_phases_stands_by_the_last_phase_that_it_reads_of() -> None:
    # The norm of gradients runs upward behind the backward; printing the loss goes with the forward.
    nodes = [
        op("loss"),
        op("mm", phase="backward"),
        op("norm", phase=None),
        op("item", phase=None),
    ]
    edges = [edge(0, 1), edge(1, 2), edge(0, 3)]
    assert body(render_dot(view(nodes, edges), style=Bare()))[-2:] == ['n2 -> n1 [dir="back"]', "n0 -> n3"]


def test_reads_of_the_optimizer_are_one_edge_from_each_side() -> None:
    seen: list[tuple[str, str, int]] = []

    class Seeing(Bare):
        def edge(self, edge: ViewEdge, source: ViewNode, target: ViewNode) -> dict[str, Any]:
            seen.append((source.label, target.label, edge.reads))
            return {}

    render_dot(whole_step(), style=Seeing())
    assert seen[-2:] == [("a", "(optimizer)", 2), ("a", "(optimizer)", 2)]


def test_call_that_runs_no_op_is_held_between_what_ran_before_and_after_it() -> None:
    nodes = [op("a"), layer("drop", "Dropout", ops=0), op("b"), op("alone")]
    assert body(render_dot(view(nodes, [edge(0, 2)]), style=Bare()))[-3:] == [
        "n0 -> n2",
        "n0 -> n1 [style=invis]",
        "n1 -> n2 [style=invis]",
    ]
    upward = [op("a"), op("b", phase="backward"), layer("drop", "Dropout", phase="backward", ops=0)]
    assert body(render_dot(view(upward, []), style=Bare()))[-1] == "n2 -> n1 [style=invis]"


def test_what_is_written_of_names_is_what_is_read_of_them() -> None:
    name = 'a"b\\c\nd<e>&amp;\\N{é}\x07'
    text = render_dot(view([op(name)]), style=Bare())
    assert body(text) == [r'n0 [label="a\"b\\c\nd<e>&amp;amp;\\N{é}\\x07"]']


def test_marks_and_missing_ops_are_told_in_the_picture() -> None:
    shown = view(
        [layer("a", "A"), layer("b", "B")], [edge(0, 1, kind=NEXT)], has_ops=False, marks=("cut <off>",)
    )
    text = render_dot(shown)
    assert "No ops were recorded: the arrows say which call began next." in text
    assert "cut &lt;off&gt;" in text
    assert 'n0 -> n1 [style="dashed" tooltip="next"]' in text


def test_20_000_nodes_in_a_row_and_boxes_3_000_deep_need_no_recursion() -> None:
    deep = [box(f"b{at}", "B", box=at - 1) for at in range(3_000)]
    nodes = [op("add", box=at % 3_000) for at in range(20_000)]
    text = render_dot(view(nodes, [edge(at, at + 1) for at in range(19_999)], deep))
    assert text.count("subgraph cluster_b") == 3_000
    assert text.count(" -> ") == 19_999
    assert text.count("{\n") == text.count("}\n") == 3_001
    assert max(map(len, text.splitlines())) < 700
