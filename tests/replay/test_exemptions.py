"""What an op reads without being changed by it falls under a rule of that name, and only where it must."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import modtrace
from helpers.proved import Calls
from modtrace.replay.exemptions import HIDDEN, RULES, SAME_AS_CHECKED

ALL, NONE = torch.ones(3, 4, dtype=torch.bool), torch.zeros(3, 4, dtype=torch.bool)
SOME = torch.tensor([[True, False, True, False]]).expand(3, 4)
ZEROS = torch.zeros(2, dtype=torch.long)

CASES = {
    "no elements": lambda x: torch.cat([x, torch.empty(0)]),
    "memory left as it was": lambda x: torch.empty_like(x).copy_(x),
    "only its shape is used": torch.zeros_like,
    "overwritten": lambda x: x.clone().fill_(1.0),
    "hidden by other arguments": lambda x: torch.where(ALL, 1.0, x),
    "an index with one place to go": lambda x: F.embedding(ZEROS, x),
    "a single choice": lambda x: x[:, :1].argmax(1),
}


def exempt(function):
    with torch.no_grad():
        found = modtrace.verify(Calls(lambda model, x: function(x)), (torch.randn(3, 4),))
    assert found, f"\n{found}"
    return set(found.exempt)


@pytest.mark.parametrize("rule", CASES)
def test_op_that_falls_under_the_rule_is_counted(seeded, rule):
    assert rule in exempt(CASES[rule])


@pytest.mark.parametrize(
    "function",
    [
        lambda x: torch.where(SOME, x, -x),
        lambda x: x.masked_fill(SOME, 0.0),
        lambda x: F.relu(-x.abs()),
        lambda x: x * 0,
        lambda x: x > 1e9,
        lambda x: x.isnan(),
        lambda x: F.dropout(x, 1.0),
        lambda x: x[:, :1].softmax(1),
        lambda x: x.clamp(0.0, 1e-3),
        lambda x: x.argmax(1),
        lambda x: F.embedding(torch.tensor([0, 2]), x),
        lambda x: x.expand(2, 3, 4).clone(),
        lambda x: torch.tensor([7]).eq(0),
        lambda x: torch.ones(3, dtype=torch.uint8) & 1,
        lambda x: x.clone().t().mul_(2),
        lambda x: torch.complex(x, x).conj() * 2,
    ],
)
def test_op_that_reads_its_arguments_needs_no_rule(seeded, function):
    assert exempt(function) == set()


def test_weight_of_a_convolution_is_not_read_for_gradients_of_parameters_alone(seeded):
    found = modtrace.verify(nn.Conv2d(2, 3, 3), (torch.randn(1, 2, 5, 5),))
    assert found, f"\n{found}"
    assert found.exempt["its gradient is not wanted"] == 1


def test_backward_of_an_lstm_finds_most_of_what_it_reads_in_the_workspace_of_its_kernel(seeded):
    model = nn.LSTM(4, 5, num_layers=2, bidirectional=True, batch_first=True)
    found = modtrace.verify(model, (torch.randn(2, 6, 4),))
    assert found, f"\n{found}"
    assert set(found.exempt) == {SAME_AS_CHECKED, "only its shape is used"}


def test_fourth_op_of_a_kind_is_the_same_as_checked(seeded):
    def run(x):
        for _ in range(5):
            x = x.tanh()
        return x

    with torch.no_grad():
        found = modtrace.verify(Calls(lambda model, x: run(x)), (torch.randn(3, 4),))
    assert found.exempt == {SAME_AS_CHECKED: 2}
    assert found.check("perturbation").why == "3 tensors change what their op gives, 2 are exempt by rule"


def test_every_rule_is_explained_in_the_documentation():
    from pathlib import Path

    page = (Path(__file__).parent.parent.parent / "docs" / "verify.md").read_text(encoding="utf-8")
    table = [line.split(" | ")[0].removeprefix("| ") for line in page.splitlines() if line.startswith("| ")]
    assert [each for each in (*RULES, HIDDEN, SAME_AS_CHECKED) if each not in table] == []
