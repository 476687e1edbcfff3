"""Layers that stand several times in one list are told of."""

import pytest
from torch import nn

from helpers.findings import check_run
from helpers.health_models import FAMILIES, Stack, train


@pytest.mark.parametrize("family", FAMILIES)
def test_layer_that_stands_several_times_in_a_list_is_a_note(family: str) -> None:
    model = Stack(FAMILIES[family])
    model.blocks = nn.ModuleList([model.blocks[0]] * 3)
    (found,) = check_run(train(model), "shared-modules")
    assert found.severity == "note"
    assert found.text == "blocks.0..2 are one module, with the same parameters at 3 places"


@pytest.mark.parametrize("family", FAMILIES)
def test_activation_at_several_places_and_module_with_two_names_are_left_alone(family: str) -> None:
    model, act = Stack(FAMILIES[family]), nn.Tanh()
    model.blocks = nn.Sequential(model.blocks[0], act, model.blocks[1], act)
    model.table = model.embed
    assert check_run(train(model), "shared-modules") == ()
