"""What the graphs of small models are, in full: each model has one difficulty."""

import re

import torch

import modtrace
from helpers.graph_models import draw_case, make_case
from helpers.typed_graphs import box_lines, edge_lines
from modtrace.api.model_graph import ModelGraph


def loose(graph: ModelGraph) -> list[str]:
    """The nodes that no edge leads to or from."""
    joined = {end for each in graph.edges for end in (each.source, each.target)}
    return [each.key for at, each in enumerate(graph.nodes) if at not in joined]


# Ops.


def test_layers_one_after_the_other():
    graph = draw_case("MLP")
    assert edge_lines(graph) == [
        "parameter:0.weight -> forward/Sequential/0/aten.t.default (self)",
        "parameter:0.bias -> forward/Sequential/0/aten.addmm.default (self)",
        "input:[0] -> forward/Sequential/0/aten.addmm.default (mat1)",
        "forward/Sequential/0/aten.t.default -> forward/Sequential/0/aten.addmm.default (mat2)",
        "forward/Sequential/0/aten.addmm.default -> forward/Sequential/1/aten.tanh.default (self)",
        # Autograd keeps what tanh returns.
        "forward/Sequential/1/aten.tanh.default -> forward/Sequential/1/aten.detach.default (self)",
        "parameter:2.weight -> forward/Sequential/2/aten.t.default (self)",
        "parameter:2.bias -> forward/Sequential/2/aten.addmm.default (self)",
        "forward/Sequential/1/aten.tanh.default -> forward/Sequential/2/aten.addmm.default (mat1)",
        "forward/Sequential/2/aten.t.default -> forward/Sequential/2/aten.addmm.default (mat2)",
        "forward/Sequential/2/aten.addmm.default -> forward/output:output (output)",
    ]
    assert loose(graph) == []
    assert box_lines(graph) == [
        "forward/Sequential",
        "  forward/Sequential/0",
        "  forward/Sequential/1",
        "  forward/Sequential/2",
    ]


def test_two_inputs():
    graph = draw_case("two inputs")
    assert edge_lines(graph) == [
        "input:[0] -> forward/Bilinear/mix/aten.view.default (self)",
        "input:[1] -> forward/Bilinear/mix/aten.view.default#1 (self)",
        "forward/Bilinear/mix/aten.view.default -> forward/Bilinear/mix/aten._trilinear.default (i1)",
        "parameter:mix.weight -> forward/Bilinear/mix/aten._trilinear.default (i2)",
        "forward/Bilinear/mix/aten.view.default#1 -> forward/Bilinear/mix/aten._trilinear.default (i3)",
        "forward/Bilinear/mix/aten._trilinear.default -> forward/Bilinear/mix/aten.view.default#2 (self)",
        "forward/Bilinear/mix/aten.view.default#2 -> forward/Bilinear/mix/aten.add.Tensor (self)",
        "parameter:mix.bias -> forward/Bilinear/mix/aten.add.Tensor (other)",
        "forward/Bilinear/mix/aten.add.Tensor -> forward/output:output (output)",
    ]
    assert loose(graph) == []


def test_what_relu_has_written_in_place_is_returned():
    assert edge_lines(draw_case("in-place ReLU"))[-3:] == [
        "forward/Sequential/0/aten.addmm.default -> forward/Sequential/1/aten.relu_.default (self)",
        "forward/Sequential/1/aten.relu_.default -> forward/Sequential/1/aten.detach.default (self)",
        "forward/Sequential/1/aten.relu_.default -> forward/output:output (output)",
    ]


def test_view_of_a_view_of_a_view():
    graph = draw_case("views")
    assert edge_lines(graph) == [
        "input:[0] -> forward/Views/aten.view.default (self)",
        "forward/Views/aten.view.default -> forward/Views/aten.slice.Tensor (self)",
        "forward/Views/aten.slice.Tensor -> forward/Views/aten.unsqueeze.default (self)",
        "forward/Views/aten.unsqueeze.default -> forward/Views/aten.mul.Tensor (self)",
        "forward/Views/aten.mul.Tensor -> forward/output:output (output)",
    ]
    assert edge_lines(graph.without_views()) == [
        "input:[0] -> forward/Views/aten.mul.Tensor (self)",
        "forward/Views/aten.mul.Tensor -> forward/output:output (output)",
    ]


def test_whole_model_under_no_grad_has_the_same_edges():
    case = make_case("two inputs")
    with torch.no_grad():
        without = modtrace.graph(case.model, *case.args)
    assert edge_lines(without) == edge_lines(draw_case("two inputs"))


# Parameters and buffers.


def box_of(graph: ModelGraph, key: str) -> str | None:
    """The key of the box around a node."""
    [node] = [each for each in graph.nodes if each.key == key]
    return None if node.box < 0 else graph.boxes[node.box].key


def test_buffers_are_nodes_and_the_count_of_batches_is_only_written():
    graph = draw_case("BatchNorm")
    assert edge_lines(graph) == [
        "buffer:0.num_batches_tracked -> forward/Sequential/0/aten.add_.Tensor (self)",
        "input:[0] -> forward/Sequential/0/aten.native_batch_norm.default (input)",
        "parameter:0.weight -> forward/Sequential/0/aten.native_batch_norm.default (weight)",
        "parameter:0.bias -> forward/Sequential/0/aten.native_batch_norm.default (bias)",
        "buffer:0.running_mean -> forward/Sequential/0/aten.native_batch_norm.default (running_mean)",
        "buffer:0.running_var -> forward/Sequential/0/aten.native_batch_norm.default (running_var)",
        "forward/Sequential/0/aten.native_batch_norm.default -> forward/output:output (output)",
    ]
    assert loose(graph) == ["forward/Sequential/0/aten.empty.memory_format"]  # room for cuDNN


def test_attention_reads_the_weights_of_a_module_that_it_does_not_call():
    graph = draw_case("attention")
    into_last = [
        re.sub(r"aten\.(_unsafe_view\.default|view\.default#9)", "a view", each)  # by torch's release
        for each in edge_lines(graph)
        if "-> forward/MultiheadAttention/aten.addmm.default#3" in each
    ]
    assert into_last == [
        "parameter:out_proj.bias -> forward/MultiheadAttention/aten.addmm.default#3 (self)",
        "forward/MultiheadAttention/a view -> forward/MultiheadAttention/aten.addmm.default#3 (mat1)",
        "forward/MultiheadAttention/aten.t.default#3 -> forward/MultiheadAttention/aten.addmm.default#3 (mat2)",
    ]  # fmt: skip
    assert "parameter:out_proj.weight -> forward/MultiheadAttention/aten.t.default#3 (self)" in edge_lines(
        graph
    )
    assert box_of(graph, "parameter:out_proj.weight") == "forward/MultiheadAttention"
    assert [each.name for each in graph.nodes if each.kind == "parameter"] == [
        "in_proj_weight",
        "in_proj_bias",
        "out_proj.weight",
        "out_proj.bias",
    ]


# Modules.


def test_module_called_three_times_has_three_boxes_and_one_weight():
    graph = draw_case("called three times")
    root, layer = "forward/CalledThreeTimes", "forward/CalledThreeTimes/layer"
    assert edge_lines(graph) == [
        f"parameter:layer.weight -> {layer}/aten.t.default (self)",
        f"input:[0] -> {layer}/aten.mm.default (self)",
        f"{layer}/aten.t.default -> {layer}/aten.mm.default (mat2)",
        f"parameter:layer.weight -> {layer}@1/aten.t.default (self)",
        f"{layer}/aten.mm.default -> {layer}@1/aten.mm.default (self)",
        f"{layer}@1/aten.t.default -> {layer}@1/aten.mm.default (mat2)",
        f"parameter:layer.weight -> {layer}@2/aten.t.default (self)",
        f"{layer}@1/aten.mm.default -> {layer}@2/aten.mm.default (self)",
        f"{layer}@2/aten.t.default -> {layer}@2/aten.mm.default (mat2)",
        f"{layer}@2/aten.mm.default -> forward/output:output (output)",
    ]
    assert box_lines(graph) == [root, f"  {layer}", f"  {layer}@1", f"  {layer}@2"]
    assert edge_lines(graph.collapse("layer")) == [
        f"parameter:layer.weight -> {layer} (self)",
        f"input:[0] -> {layer} (self)",
        f"parameter:layer.weight -> {layer}@1 (self)",
        f"{layer} -> {layer}@1 (self)",
        f"parameter:layer.weight -> {layer}@2 (self)",
        f"{layer}@1 -> {layer}@2 (self)",
        f"{layer}@2 -> forward/output:output (output)",
    ]


def test_two_layers_of_an_lstm_read_their_own_weights():
    graph = draw_case("LSTM")
    assert [each.name for each in graph.nodes if each.kind == "parameter"] == [
        f"{name}_l{layer}" for layer in (0, 1) for name in ("weight_ih", "weight_hh", "bias_ih", "bias_hh")
    ]
    assert edge_lines(graph.collapse(depth=0)) == [
        "input:[0] -> forward/LSTM (input)",
        "forward/LSTM -> forward/output:output[0] (output[0])",
        "forward/LSTM -> forward/output:output[1][0] (output[1][0])",
        "forward/LSTM -> forward/output:output[1][1] (output[1][1])",
    ]
    assert loose(graph) == []
