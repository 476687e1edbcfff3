"""The graph of ResNet-18, seen at every depth."""

import importlib
import sys
from collections import Counter
from pathlib import Path

import pytest
import torch

import modtrace
from helpers.typed_graphs import box_lines, edge_lines
from modtrace.api.model_graph import ModelGraph

EXAMPLES = Path(__file__).parents[2] / "examples"
NET = "forward/ResNet18"


@pytest.fixture(scope="module")
def graph() -> ModelGraph:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "path", [*sys.path, str(EXAMPLES)])
        model = importlib.import_module("resnet18_paths").resnet18()
    return modtrace.graph(model, torch.zeros(2, 3, 32, 32))


def test_depth_1_is_the_layers_and_the_flattening_between_them(graph: ModelGraph):
    seen = graph.collapse(depth=1)
    assert edge_lines(seen) == [
        f"input:[0] -> {NET}/conv1 (input)",
        f"{NET}/conv1 -> {NET}/bn1 (input)",
        f"{NET}/bn1 -> {NET}/relu (self)",
        f"{NET}/relu -> {NET}/maxpool (self)",
        f"{NET}/maxpool -> {NET}/layer1 (input) ×2",
        f"{NET}/layer1 -> {NET}/layer2 (input) ×2",
        f"{NET}/layer2 -> {NET}/layer3 (input) ×2",
        f"{NET}/layer3 -> {NET}/layer4 (input) ×2",
        f"{NET}/layer4 -> {NET}/avgpool (self)",
        f"{NET}/avgpool -> {NET}/aten.view.default (self)",
        f"{NET}/aten.view.default -> {NET}/fc (mat1)",
        f"{NET}/fc -> forward/output:output (output)",
    ]
    assert len(seen.nodes) == 13
    assert box_lines(seen) == [NET]


def test_depth_3_is_the_inside_of_the_blocks(graph: ModelGraph):
    block, before = f"{NET}/layer2.0", f"{NET}/layer1.1.relu@1"
    assert [each for each in edge_lines(graph.collapse(depth=3)) if f"-> {block}" in each] == [
        f"{before} -> {block}.conv1 (input)",
        f"{block}.conv1 -> {block}.bn1 (input)",
        f"{block}.bn1 -> {block}.relu (self)",
        f"{block}.relu -> {block}.conv2 (input)",
        f"{block}.conv2 -> {block}.bn2 (input)",
        f"{before} -> {block}.downsample (input)",
        f"{block}.bn2 -> {block}/aten.add_.Tensor (self)",
        f"{block}.downsample -> {block}/aten.add_.Tensor (other)",
        f"{block}/aten.add_.Tensor -> {block}.relu@1 (self)",
    ]


def test_whole_graph_has_every_op_parameter_and_buffer_once(graph: ModelGraph):
    assert Counter(each.label for each in graph.nodes if each.kind == "op") == {
        "convolution": 20,
        "native_batch_norm": 20,
        "empty": 20,
        "add_": 20 + 8,
        "relu_": 17,
        "detach": 17,
        "max_pool2d_with_indices": 1,
        "mean": 1,
        "view": 1,
        "t": 1,
        "addmm": 1,
    }
    kinds = Counter(each.kind for each in graph.nodes)
    assert kinds == {"op": 127, "parameter": 62, "buffer": 60, "input": 1, "output": 1}
    assert len(graph.edges) == 218
    assert len(graph.boxes) == 1 + 67 + 8  # the net; its modules; a second call of each block's ReLU


def test_skip_connection_joins_what_two_ops_have_written_in_place(graph: ModelGraph):
    assert [each for each in edge_lines(graph) if f"-> {NET}/layer1.0/" in each] == [
        f"{NET}/layer1.0.bn2/aten.native_batch_norm.default -> {NET}/layer1.0/aten.add_.Tensor (self)",
        f"{NET}/maxpool/aten.max_pool2d_with_indices.default -> {NET}/layer1.0/aten.add_.Tensor (other)",
    ]
