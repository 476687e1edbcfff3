"""The execution graphs of ten transformers architectures: nothing is lost, and edges lead from earlier to later."""

from typing import Any

import numpy as np
import pytest
import torch

import modtrace
from helpers.architectures import ARCHITECTURES
from modtrace.api.graph import graph_of
from modtrace.api.model_graph import ModelGraph

pytest.importorskip("transformers")


def record_step(name: str) -> modtrace.Recording:
    """A forward and a backward of a tiny model."""
    torch.manual_seed(0)
    model, inputs = ARCHITECTURES[name]()
    with modtrace.record(model, ops=True, values=None, strict=True) as rec:
        model(**inputs).loss.backward()
    return rec


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_graph_has_every_op_and_every_read_in_order(name: str) -> None:
    rec = record_step(name)
    graph = graph_of(rec.data)
    assert_whole(rec, graph)
    assert_in_order(graph)
    assert graph.collapse(depth=2).expand().view == graph.view
    assert graph.collapse(depth=3).collapse(depth=1).view == graph.collapse(depth=1).view


def assert_whole(rec: modtrace.Recording, graph: ModelGraph) -> None:
    """Every op that reads or returns tensors is one node, every read by an op is one edge."""
    columns = graph.columns
    uses, tensors = rec.table("uses").to_pylist(), rec.table("tensors").to_pylist()
    reads = [each for each in uses if each["consumer_op"] is not None]
    made = {each["producer_op"] for each in tensors} - {None}
    ops = columns.nodes.op_id[columns.nodes.op_id >= 0].tolist()
    assert len(set(ops)) == len(ops)
    assert set(ops) == {each["consumer_op"] for each in reads} | made
    expected = sorted((each["consumer_op"], each["slot"], each["tensor_id"]) for each in reads)
    assert sorted(op_edges(graph)) == expected


def op_edges(graph: ModelGraph) -> list[tuple[Any, ...]]:
    """Of each edge into an op: the op, the argument, and the tensor."""
    nodes, edges, tensors = graph.columns.nodes, graph.columns.edges, graph.columns.tensors
    into = np.flatnonzero(nodes.op_id[edges.target] >= 0)
    return [
        (
            int(nodes.op_id[edges.target[at]]),
            edges.slots[edges.slot[at]],
            int(tensors.tensor_id[edges.tensor[at]]),
        )
        for at in into.tolist()
    ]


def assert_in_order(graph: ModelGraph) -> None:
    """Every edge joins something to what came later."""
    nodes, edges = graph.columns.nodes, graph.columns.edges
    assert len(edges) > 0
    assert (nodes.order[edges.source] < nodes.order[edges.target]).all()
    assert sorted(nodes.order.tolist()) == list(range(len(nodes)))
    assert not any(each.is_loop for each in graph.edges)


BLOCKS = [("GPT-2", "transformer.h"), ("Llama", "model.layers")]


@pytest.mark.parametrize(("name", "layers"), BLOCKS)
def test_blocks_fold_in_forward(name: str, layers: str) -> None:
    assert folded_blocks(name, layers, "forward") == [f"{layers}.0 ×2"]


@pytest.mark.parametrize(("name", "layers"), BLOCKS)
def test_blocks_fold_in_backward(name: str, layers: str) -> None:
    assert folded_blocks(name, layers, "backward") == [f"{layers}.1 ×2"]


def folded_blocks(name: str, layers: str, phase: str) -> list[str]:
    """The boxes of whole blocks in a phase: `model.layers.0 ×2`."""
    boxes = graph_of(record_step(name).data).fold().boxes
    whole = [each for each in boxes if each.phase == phase and is_block(each.path, layers)]
    return [f"{each.path} ×{each.repeats}" for each in whole]


def is_block(path: str | None, layers: str) -> bool:
    return path is not None and path.rpartition(".")[0] == layers
