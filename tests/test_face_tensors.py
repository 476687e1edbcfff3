"""Whole tensors of a real run are read back by their place, while it runs and afterwards."""

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import modtrace
from modtrace.face import Recording


class Recorded:
    """Three steps of a small model, with what its first module has returned."""

    def __init__(self, to: Path | None) -> None:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 3), nn.ReLU()).to(torch.bfloat16)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        self.outputs: list[Tensor] = []
        self.weights: list[Tensor] = []
        self.seen: list[Tensor] = []  # through the recording, while it runs
        kept = modtrace.Capture(roles=("output", "parameter"), tensors=True)
        model[0].register_forward_hook(lambda *args: self.outputs.append(args[2].detach().clone()))
        with modtrace.record(model, to=to, values=kept, strict=True) as self.rec:
            for step in range(3):
                self.weights.append(model[0].weight.detach().clone())
                model(torch.randn(2, 4, dtype=torch.bfloat16)).sum().backward()
                optimizer.step()
                optimizer.zero_grad()
                self.rec.step()
                self.seen.append(self.rec.tensor("0", step))

    def check(self, rec: Recording) -> None:
        for step in range(3):
            assert same(rec.tensor("0", step), self.outputs[step])
            assert same(rec.tensor("0.weight", step, role="parameter"), self.weights[step])
        assert [step for step, _ in rec.tensors("1")] == [0, 1, 2]


def same(one: Tensor, other: Tensor) -> bool:
    return one.dtype == other.dtype and torch.equal(one.view(torch.int16), other.view(torch.int16))


@pytest.fixture(params=[True, False], ids=["folder", "memory"])
def recorded(request: pytest.FixtureRequest, tmp_path: Path, seeded: None) -> Recorded:
    return Recorded(tmp_path / "run.modtrace" if request.param else None)


def test_tensors_are_those_of_the_run(recorded: Recorded) -> None:
    recorded.check(recorded.rec)
    assert recorded.rec.meta.marks == ()


def test_tensors_are_read_while_the_run_goes_on(recorded: Recorded) -> None:
    assert all(map(same, recorded.seen, recorded.outputs))


def test_copy_has_them_too(recorded: Recorded, tmp_path: Path) -> None:
    recorded.rec.write(tmp_path / "copy.modtrace")
    recorded.check(modtrace.open_recording(tmp_path / "copy.modtrace"))
