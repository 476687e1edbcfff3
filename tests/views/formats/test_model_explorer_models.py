"""Graphs and node data of recorded models, as Model Explorer takes them."""

import pytest

from helpers.explorer_json import load_graph, load_node_data
from helpers.recorded_views import record_architecture, record_gpt, view_of
from modtrace.analysis.graph_view.records import GraphView
from modtrace.recording.protocols import RecordingData
from modtrace.views.formats.model_explorer_data import NODE_DATA


@pytest.fixture(scope="module", params=["GPT", "GPT-2", "Whisper", "Mixtral"])
def recorded(request: pytest.FixtureRequest) -> RecordingData:
    """A step of the GPT of the demo with checkpoints, or of a transformers architecture."""
    return record_gpt("non-reentrant") if request.param == "GPT" else record_architecture(request.param)


@pytest.fixture(params=["open", "folded at depth 2", "with tensors"])
def view(request: pytest.FixtureRequest, recorded: RecordingData) -> GraphView:
    if request.param == "open":
        return view_of(recorded)
    return (
        view_of(recorded, depth=2, folded=True)
        if "depth" in request.param
        else view_of(recorded, tensors=True)
    )


def test_graph_of_a_model_is_whole(view: GraphView) -> None:
    graph = load_graph(view)
    ids = {each.id: each for each in graph.nodes}
    assert len(ids) == len(graph.nodes) == len(view.nodes) > 30
    assert sum(len(each.incomingEdges) for each in graph.nodes) == len(view.edges) > 30
    for node in graph.nodes:
        assert [each.id for each in node.inputsMetadata] == [
            each.targetNodeInputId for each in node.incomingEdges
        ]
        for edge in node.incomingEdges:
            source = ids[edge.sourceNodeId]
            assert edge.sourceNodeOutputId in {each.id for each in source.outputsMetadata}
        keys = [each.key for each in node.attrs]
        assert len(set(keys)) == len(keys)
        links = [each.value.nodeIds for each in node.attrs if not isinstance(each.value, str)]
        assert all(target in ids for link in links for target in link)
    assert {each.namespace for each in graph.nodes} <= set(graph.groupNodeAttributes)
    assert len(graph.groupNodeAttributes) == len(view.boxes) + 1


def test_node_data_of_a_model_are_about_its_nodes(view: GraphView) -> None:
    ids = {each.key for each in view.nodes}
    for name in NODE_DATA:
        assert load_node_data(view, name).results.keys() <= ids
    times = load_node_data(view, "time_us").results
    working = {each.key for each in view.nodes if each.kind in ("op", "layer")}
    assert times.keys() == working
    assert sum(each.value for each in load_node_data(view, "flops").results.values()) > 1000
    assert {each.value for each in load_node_data(view, "nonfinite").results.values()} >= {0}


def test_gpt_of_the_demo_is_seen_with_its_phases_blocks_and_checkpoints() -> None:
    namespaces = {each.namespace for each in load_graph(view_of(record_gpt("non-reentrant"))).nodes}
    assert {each.split("/")[0] for each in namespaces} == {
        "",
        "forward",
        "recompute",
        "backward",
        "optimizer",
    }
    assert {
        "forward/GPT/blocks/0/attn",
        "forward/GPT/blocks/1/mlp",
        "recompute/GPT/blocks/0/attn",
        "backward/GPT/blocks/0/attn",
    } <= {"/".join(each.split("/")[:5]) for each in namespaces}
