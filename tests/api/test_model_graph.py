"""`modtrace.graph`: of a model, of a recording, of the path of one; and what is refused."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import modtrace
from helpers.graph_models import Views, make_case, ones
from helpers.typed_graphs import box_lines, edge_lines, node_lines
from helpers.typed_steps import record_training
from modtrace.api.model_graph import ModelGraph
from modtrace.errors import RecordingNotFoundError
from modtrace.store.copy import write_recording


@pytest.fixture
def graph() -> ModelGraph:
    """Of a linear layer, tanh, and another linear layer."""
    case = make_case("MLP")
    return modtrace.graph(case.model, *case.args)


# Of a model.


def test_shapes_may_be_given_instead_of_arguments(graph: ModelGraph):
    found = modtrace.graph(make_case("MLP").model, input_shapes=[(2, 4)])
    assert edge_lines(found) == edge_lines(graph)
    assert [each.shape for each in found.nodes if each.kind in ("input", "output")] == [(2, 4), (2, 2)]


def test_shapes_may_come_with_a_dtype():
    found = modtrace.graph(make_case("Embedding").model, input_shapes=[((3, 2), torch.int64)])
    inputs = [(each.shape, each.dtype) for each in found.nodes if each.kind == "input"]
    assert inputs == [((3, 2), "int64")]


def test_what_is_given_by_name_may_stand_beside_shapes():
    case = make_case("plain arguments by name")
    found = modtrace.graph(case.model, input_shapes=[(2,), (2,)], **case.kwargs)
    assert [each.key for each in found.nodes if each.kind == "input"] == ["input:[0]", "input:[1]"]


def test_module_of_fx_has_the_layers_of_what_was_traced(graph: ModelGraph):
    case = make_case("MLP")
    found = modtrace.graph(torch.fx.symbolic_trace(case.model), *case.args)
    assert (edge_lines(found), box_lines(found)) == (edge_lines(graph), box_lines(graph))


def test_model_without_ops_leads_from_its_input_to_its_output():
    found = modtrace.graph(nn.Sequential(nn.Identity(), nn.Identity()), ones(2))
    assert edge_lines(found) == ["input:[0] -> forward/output:output (output)"]


def test_model_without_ops_is_not_told_to_record_ops():
    assert "record with ops=True" not in str(modtrace.graph(nn.Identity(), ones(2)))


# Of a recording.


def test_recording_its_path_and_its_method_give_the_same_graph(tmp_path: Path):
    case = make_case("MLP")
    with modtrace.record(case.model, ops=True, to=tmp_path / "run.modtrace") as rec:
        case.model(*case.args).sum().backward()
    of_rec = modtrace.graph(rec)
    path = tmp_path / "run.modtrace"
    for other in (rec.graph(), modtrace.graph(path), modtrace.graph(str(path)), modtrace.graph(path, step=0)):
        assert (node_lines(other), edge_lines(other)) == (node_lines(of_rec), edge_lines(of_rec))
    assert of_rec.view.phases == ("forward", "backward")


def test_forward_of_a_recording_is_that_of_the_model(graph: ModelGraph):
    case = make_case("MLP")
    with modtrace.record(case.model, ops=True) as rec:
        case.model(*case.args).sum().backward()
    assert edge_lines(rec.graph().filter(phase="forward", path="**")) == edge_lines(graph)


def test_step_of_a_recording_is_chosen_by_its_number():
    batches = [torch.ones(rows, 4) for rows in (1, 2, 3)]
    model = make_case("MLP").model
    with modtrace.record(model, ops=True) as rec:
        for given in batches:
            model(given)
            rec.step()
    shapes = [
        [each.shape for each in modtrace.graph(rec, step=step).nodes if each.kind == "output"]
        for step in (0, 1, 2)
    ]
    assert shapes == [[(1, 2)], [(2, 2)], [(3, 2)]]
    assert [each.shape for each in rec.graph().nodes if each.kind == "output"] == [(3, 2)]


def test_input_that_an_op_outside_has_made_is_no_output():
    model = nn.Linear(2, 2, bias=False)
    with modtrace.record(model, ops=True) as rec:
        model(ones(1, 2)[:1])
    assert edge_lines(rec.graph()) == [
        "outside/aten.ones.default -> outside/aten.slice.Tensor (self)",
        "parameter:weight -> forward/Linear/aten.t.default (self)",
        "outside/aten.slice.Tensor -> forward/Linear/aten.mm.default (self)",
        "forward/Linear/aten.t.default -> forward/Linear/aten.mm.default (mat2)",
        "forward/Linear/aten.mm.default -> forward/output:output (output)",
    ]


def test_recording_is_not_called(tmp_path: Path):
    write_recording(record_training().data(), tmp_path / "run.modtrace")
    for args, options in (((ones(1),), {}), ((), {"input_shapes": [(1,)]}), ((), {"x": 1})):
        with pytest.raises(
            TypeError, match=r"^graph\(\): a recording is not called; only step= can be given"
        ):
            modtrace.graph(tmp_path / "run.modtrace", *args, **options)
    with pytest.raises(ValueError, match=r"^no step 7 in this recording; there are: 0$"):
        modtrace.graph(tmp_path / "run.modtrace", step=7)


# What is refused.


def test_arguments_and_shapes_are_not_both_given():
    with pytest.raises(
        TypeError, match=r"^graph\(\): give the arguments of the model or input_shapes, not both"
    ):
        modtrace.graph(nn.Linear(2, 2), ones(1, 2), input_shapes=[(1, 2)])


@pytest.mark.parametrize("subject", [3, None, nn.Linear, Views.forward, {"model": 1}], ids=type)
def test_what_is_neither_a_model_nor_a_recording_is_refused(subject: object):
    with pytest.raises(TypeError, match=r"give a torch\.nn\.Module"):
        modtrace.graph(subject)


@pytest.mark.parametrize("subject", [torch.ones(2), np.ones(2)], ids=["tensor", "array"])
def test_tensor_is_refused(subject: Any):
    with pytest.raises(TypeError, match=r"give a torch\.nn\.Module"):
        modtrace.graph(subject)


def test_path_where_nothing_is_is_an_error(tmp_path: Path):
    with pytest.raises(RecordingNotFoundError, match="nothing is there"):
        modtrace.graph(tmp_path / "nowhere")


@pytest.mark.parametrize(
    ("choose", "text"),
    [
        (lambda graph: graph.collapse(), "collapse(): give depth=..., or the paths of modules"),
        (lambda graph: graph.collapse(depth=-1), "depth=-1: give 0 to see the roots alone, or more"),
        (
            lambda graph: graph.collapse("7"),
            "collapse('7'): no module of this graph has such a path; the nearest are: 2, 1, 0",
        ),
        (
            lambda graph: graph.expand("7"),
            "expand('7'): no module of this graph has such a path; the nearest are: 2, 1, 0",
        ),
        (
            lambda graph: graph.filter(phase="sideways"),
            "no phase 'sideways'; there are: forward, backward, recompute, optimizer",
        ),
        (
            lambda graph: graph.filter(path="7"),
            "filter(path='7'): no module with ops of this step matches; the nearest are: 2, 1, 0",
        ),
        (
            lambda graph: graph.filter(op="conv*"),
            "filter(op='conv*'): no op of this step matches; there are: aten.addmm.default, aten.detach.default, "
            "aten.t.default, aten.tanh.default",
        ),
        (
            lambda graph: graph.filter(op=["tanh", "adm"], path="nowhere"),
            "filter(path='nowhere', op=['tanh', 'adm']): no op of this step matches; "
            'there are: "", 0, 1, 2',
        ),
        (
            lambda graph: graph.filter(op="admm*"),
            "filter(op='admm*'): no op of this step matches. Did you mean 'addmm'?",
        ),
        (
            lambda graph: graph.filter(path="0", op="tanh"),
            "filter(path='0', op='tanh'): no op of this step matches",
        ),
    ],
)
def test_choice_that_means_nothing_is_an_error(
    graph: ModelGraph, choose: Callable[[ModelGraph], ModelGraph], text: str
):
    with pytest.raises(ValueError) as caught:
        choose(graph)
    assert str(caught.value) == text


@pytest.mark.parametrize(
    ("choose", "text"),
    [
        (lambda graph: graph.collapse(depth="2"), "depth='2'"),
        (lambda graph: graph.filter(op=3), "op=3"),
        (lambda graph: graph.filter(phase=3), "phase=3"),
    ],
)
def test_argument_of_a_wrong_type_is_named(
    graph: ModelGraph, choose: Callable[[ModelGraph], ModelGraph], text: str
):
    with pytest.raises(TypeError, match=text):
        choose(graph)


def test_phase_that_did_not_run_is_an_empty_graph(graph: ModelGraph):
    assert graph.filter(phase="backward").nodes == ()
