"""A model that gives other bits in each unrecorded run is told so, and only that one."""

import random

import numpy as np
import torch
from torch import nn
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

import modtrace
from helpers.command_line import run_command
from helpers.proved import Calls

SEEDING = """
import torch
from torch import nn

class Seeding(nn.Linear):
    def forward(self, x):
        torch.seed()
        return torch.dropout(super().forward(x), 0.5, True)

def make():
    return Seeding(40, 40), (torch.ones(2, 40),)
"""


class Counting(nn.Module):
    """Multiplies by how often it was called, from some call on."""

    def __init__(self, first: int) -> None:
        super().__init__()
        self.first = first
        Counting.calls = 0  # of the class: it is not put back

    def forward(self, x):
        Counting.calls += 1
        return x * max(Counting.calls, self.first)


def test_model_that_is_not_deterministic_is_not_held_against_the_recording(seeded):
    found = modtrace.verify(Counting(first=0), (torch.ones(2),))
    assert found, f"\n{found}"
    assert not found.is_deterministic
    assert found.headline == "Counting: its recording is proved; the model is not deterministic by itself"
    why = "two unrecorded runs differ already: output has other bits than in an unrecorded run"
    assert found.unchecked[0] == ("outputs", why)
    assert "outputs" not in [each.name for each in found.checks]


def test_model_that_differs_from_the_third_run_on_is_not_held_against_the_recording(seeded):
    found = modtrace.verify(Counting(first=2), (torch.ones(2),))
    assert found, f"\n{found}"
    assert not found.is_deterministic
    assert [what for what, _ in found.unchecked] == ["outputs", "backward"]


def test_numbers_from_generators_that_are_put_back_are_deterministic(seeded):
    def draw(model, x):
        return torch.dropout(model.one(x), 0.5, True) * random.random() + torch.rand(4) * np.random.rand()

    found = modtrace.verify(Calls(draw), (torch.randn(3, 4),))
    assert found, f"\n{found}"
    assert found.is_deterministic
    assert found.unchecked == ()


def test_run_that_differs_only_when_it_is_recorded_fails(seeded):
    def change(model, x):
        return model.one(x) + bool(_get_current_dispatch_mode_stack())

    found = modtrace.verify(Calls(change), (torch.randn(3, 4),))
    assert {each.name: each.why for each in found.checks if not each.passed} == {
        "outputs": "output has other bits than in an unrecorded run"
    }
    assert found.is_deterministic
    assert found.headline == "Calls: FAILED: outputs"


def test_command_says_that_a_model_is_not_deterministic_and_exits_with_0(
    seeded, tmp_path, monkeypatch, capsys
):
    (tmp_path / "seeding_model.py").write_text(SEEDING)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    assert run_command(monkeypatch, "verify", "seeding_model:make") == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == (
        "seeding_model:make (Seeding): its recording is proved; the model is not deterministic by itself"
    )
    assert [line.split()[:2] for line in lines if line.startswith("unchecked")] == [
        ["unchecked", "outputs"],
        ["unchecked", "gradients"],
        ["unchecked", "nothing"],
    ]
