"""NaN in a batch is told as the argument of the model that holds it, in the step that uses it, however it came in."""

import math
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, TensorDataset

import modtrace

STARTS = (0, 4, 8)


def with_nan(width: int = 8) -> torch.Tensor:
    """Returns three batches of four rows, of which the second has NaN in its third row."""
    x = torch.randn(12, width)
    x[6, 1] = math.nan
    return x


class OfNumPy(Dataset[tuple[torch.Tensor, int]]):
    """Rows of an array, with their numbers."""

    def __init__(self) -> None:
        self.rows = with_nan().numpy()

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, at: int) -> tuple[torch.Tensor, int]:
        return torch.from_numpy(self.rows[at]), at


WAYS = ("slices", "from_numpy", "tensor", "TensorDataset", "DataLoader with workers", "written by index")


def write_by_index() -> Iterator[tuple[torch.Tensor]]:
    for start in STARTS:
        x = torch.randn(4, 8)
        if start == 4:
            x[2, 1] = math.nan
        yield (x,)


def loader_of(how: str) -> Iterable[Any]:
    x = with_nan()
    loaders: dict[str, Iterable[Any]] = {
        "slices": [(x[start : start + 4],) for start in STARTS],
        "from_numpy": [(torch.from_numpy(x.numpy()[start : start + 4].copy()),) for start in STARTS],
        "tensor": ((torch.tensor(x[start : start + 4].tolist()),) for start in STARTS),
        "TensorDataset": DataLoader(TensorDataset(x), batch_size=4),
        "DataLoader with workers": DataLoader(OfNumPy(), batch_size=4, num_workers=2),
        "written by index": write_by_index(),
    }
    return loaders[how]


def train(batches: Iterable[Any], **options: Any) -> tuple[modtrace.Recording, str]:
    """Returns the recording, and where it was stopped."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    where = ""
    with (
        pytest.raises(modtrace.NonFiniteError),
        modtrace.record(model, on_nonfinite="stop", strict=True, **options) as rec,
    ):
        for step, (x, *rest) in enumerate(batches):
            target = rest[0] if rest and isinstance(rest[0], torch.Tensor) and rest[0].dim() == 2 else 0.0
            loss = (model(x) - target).square().mean()
            optimizer.zero_grad()
            loss.backward()
            where = f"optimizer of step {step}"
            optimizer.step()
            where = ""
    return rec, where


@pytest.mark.parametrize("how", WAYS)
def test_nan_in_a_batch_is_told_as_the_argument_that_holds_it(how: str) -> None:
    rec, where = train(loader_of(how), ops=True)
    found = rec.first_nonfinite()
    assert found is not None and found.after is not None
    assert where == "optimizer of step 1"
    assert (found.role, found.slot, found.source, found.step) == ("input", "[0]", "[0] of Sequential", 1)
    # A write into a view is measured as the view.
    assert found.first_index == (None if how == "written by index" else (2, 1))
    assert found.after.loss and found.after.gradients == 4
    assert found.chain[-4:] == ("addmm in 0", "relu in 1", "addmm in 2", "sub (outside of modules)")


def test_input_computed_from_what_an_op_made_in_an_earlier_step_is_told_with_that_op() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 2))
    with modtrace.record(model, ops=True, strict=True) as rec:
        table = (1 - torch.linspace(0, 1.1, 12)).sqrt()
        for at in (3, 7, 11):
            x = torch.ones(4, 8) * table[torch.tensor([0, 1, at, 2])].view(-1, 1)
            model(x).square().mean().backward()
            model.zero_grad()
    found = rec.first_nonfinite()
    assert found is not None
    assert (found.source, found.step) == ("[0] of Sequential", 2)
    assert found.hint == (
        "sqrt (outside of modules) made it in step 0; the program computed this input from it"
    )
    assert found.remedy == "look at what that op read"


def test_nan_in_targets_is_told_as_a_tensor_of_the_program() -> None:
    rec, where = train([(torch.randn(4, 8), with_nan(2)[start : start + 4]) for start in STARTS], ops=True)
    found = rec.first_nonfinite()
    assert found is not None and found.after is not None
    assert where == "optimizer of step 1"
    assert (found.role, found.source, found.step) == ("leaf", "a tensor of the program", 1)
    assert (found.first_index, found.after.loss) == ((2, 1), True)
    assert found.hint == "no op of this step has made it: it is data, or was made before"


@pytest.mark.parametrize("how", ["slices", "TensorDataset"])
def test_without_ops_the_first_module_that_was_given_them_is_told(how: str) -> None:
    rec, where = train(loader_of(how))
    found = rec.first_nonfinite()
    assert found is not None
    assert (found.path, found.role, found.step, where) == ("0", "output", 1, "optimizer of step 1")


@pytest.mark.parametrize("assign", [False, True])
def test_nan_of_a_checkpoint_is_told_as_the_parameter_that_holds_it(tmp_path: Path, assign: bool) -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 2))
    state = {name: each.clone() for name, each in model.state_dict().items()}
    state["2.weight"][1, 3] = math.nan
    torch.save(state, tmp_path / "bad.pt")
    with modtrace.record(model, ops=True, strict=True) as rec:
        model.load_state_dict(torch.load(tmp_path / "bad.pt"), assign=assign)
        model(torch.ones(4, 8)).square().mean().backward()
    found = rec.first_nonfinite()
    assert found is not None
    assert (found.kind, found.role, found.source, found.step) == ("source", "parameter", "2.weight", 0)
    assert (found.first_index, found.numel, found.path) == ((1, 3), 16, "2")
