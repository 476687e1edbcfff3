"""Graphs and node data of recorded models, as Model Explorer takes them."""

import pytest

from helpers.explorer_json import load_graph, load_node_data
from helpers.recorded_views import record_architecture, record_gpt, view_of
from modtrace.recording.protocols import RecordingData
from modtrace.views.formats.model_explorer_data import NODE_DATA


@pytest.fixture(scope="module")
def gpt() -> RecordingData:
    """A step of the GPT of the demo with checkpoints."""
    return record_gpt("non-reentrant")


@pytest.mark.parametrize("seen", ["open", "folded at depth 2", "with tensors", "Whisper"])
def test_graph_of_a_model_is_whole_and_node_data_are_about_its_nodes(seen: str, gpt: RecordingData) -> None:
    data = record_architecture(seen) if seen == "Whisper" else gpt
    how = {"folded at depth 2": {"depth": 2, "folded": True}, "with tensors": {"tensors": True}}.get(seen, {})
    view = view_of(data, **how)
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

    for name in NODE_DATA:
        assert load_node_data(view, name).results.keys() <= ids.keys()
    times = load_node_data(view, "time_us").results
    assert times.keys() == {each.key for each in view.nodes if each.kind in ("op", "layer")}
    assert sum(each.value for each in load_node_data(view, "flops").results.values()) > 1000
    assert {each.value for each in load_node_data(view, "nonfinite").results.values()} >= {0}


def test_gpt_of_the_demo_is_seen_with_its_phases_blocks_and_checkpoints(gpt: RecordingData) -> None:
    namespaces = {each.namespace for each in load_graph(view_of(gpt)).nodes}
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
