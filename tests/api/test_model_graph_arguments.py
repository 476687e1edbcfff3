"""The inputs and outputs of a graph, whatever a model takes and returns."""

import pytest
import torch

import modtrace
from helpers.graph_models import draw_case, make_case
from helpers.typed_graphs import edge_lines, node_lines


def test_input_of_integers():
    assert edge_lines(draw_case("Embedding")) == [
        "parameter:weight -> forward/Embedding/aten.embedding.default (weight)",
        "input:[0] -> forward/Embedding/aten.embedding.default (indices)",
        "forward/Embedding/aten.embedding.default -> forward/output:output (output)",
    ]


def test_tensors_handed_on_by_name_are_the_inputs_and_plain_arguments_are_none():
    graph = draw_case("plain arguments by name")
    assert edge_lines(graph) == [
        "input:[0] -> forward/ByName/inner/aten.mul.Tensor (self)",
        "input:[1] -> forward/ByName/inner/aten.mul.Tensor (other)",
        "forward/ByName/inner/aten.mul.Tensor -> forward/ByName/inner/aten.sum.dim_IntList (self)",
        "forward/ByName/inner/aten.sum.dim_IntList -> forward/output:output (output)",
    ]
    assert node_lines(graph) == [
        "input:[0]",
        "input:[1]",
        "forward/ByName/inner/aten.mul.Tensor",
        "forward/ByName/inner/aten.sum.dim_IntList",
        "forward/output:output",
    ]


def test_tensor_given_by_name_is_an_input_of_that_name():
    case = make_case("plain arguments by name")
    one, other = case.args
    graph = modtrace.graph(case.model, scale=other, x=one, **case.kwargs)
    assert edge_lines(graph)[:2] == [
        "input:['x'] -> forward/ByName/inner/aten.mul.Tensor (self)",
        "input:['scale'] -> forward/ByName/inner/aten.mul.Tensor (other)",
    ]


def test_tensor_given_at_several_places_is_named_by_the_first():
    given = torch.ones(3, 1, 4)
    graph = modtrace.graph(make_case("attention").model, given, given, given)
    assert [each.key for each in graph.nodes if each.kind == "input"] == ["input:[0]"]


def test_input_that_is_returned_as_it_is_and_an_output_returned_twice():
    class Returns(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
            y = x * 2
            return x, y, y

    assert edge_lines(modtrace.graph(Returns(), torch.ones(2))) == [
        "input:[0] -> forward/Returns/aten.mul.Tensor (self)",
        "input:[0] -> forward/output:output[0] (output[0])",
        "forward/Returns/aten.mul.Tensor -> forward/output:output[1] (output[1])",
        "forward/Returns/aten.mul.Tensor -> forward/output:output[2] (output[2])",
    ]


@pytest.mark.parametrize(
    ("name", "of_one", "of_other"),
    [
        ("nested tuples", ["[0]", "[1][1][0]"], ["[1][0]"]),
        ("dict", ["['one']"], ["['more']['other']"]),
        ("ModelOutput", [".last_hidden_state", ".hidden_states[0]"], [".hidden_states[1]"]),
        ("list", ["[0]"], ["[1]"]),
        ("None", ["[1]"], []),
    ],
)
def test_tensors_deep_in_what_is_taken_and_returned_are_found(
    name: str, of_one: list[str], of_other: list[str]
):
    if name == "ModelOutput":
        pytest.importorskip("transformers")
    one, other = "forward/Structures/aten.mul.Tensor", "forward/Structures/aten.neg.default"
    into_outputs = [f"{one} -> forward/output:output{slot} (output{slot})" for slot in of_one]
    into_outputs += [f"{other} -> forward/output:output{slot} (output{slot})" for slot in of_other]
    first, second, *rest = edge_lines(draw_case(name))
    assert first == f"input:[0]['pairs'][0][0] -> {one} (self)"
    assert second == f"input:[0]['pairs'][0][1][0] -> {other} (self)"
    assert sorted(rest) == sorted(into_outputs)


def test_cache_of_keys_and_values_is_returned_layer_by_layer():
    pytest.importorskip("transformers")
    graph = draw_case("cache").collapse("transformer.h.*").without_views()
    root = "forward/GPT2LMHeadModel"
    assert [each for each in edge_lines(graph) if "/output:" in each] == [
        f"{root}/lm_head/aten._unsafe_view.default -> forward/output:output.logits (output.logits)",
        *(
            f"{root}/transformer.h.{layer} -> forward/output:output.{slot} (output.{slot})"
            for layer in (0, 1)
            for slot in (
                f"past_key_values.layers[{layer}].keys",
                f"past_key_values.layers[{layer}].values",
            )
        ),
    ]
