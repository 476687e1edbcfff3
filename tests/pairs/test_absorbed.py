"""What both runs compute otherwise is no place if all that follows is equal; what goes on differing is one."""

from collections.abc import Callable

import pytest
import torch
from torch import nn

import modtrace

Sum = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


class Sums(nn.Module):
    """Adds three embeddings up, and goes on from there."""

    def __init__(self, add_up: Sum, factor: float = 1.0, *, returns_all: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.one, self.two, self.three = (nn.Embedding(9, 16) for _ in range(3))
        self.norm, self.out = nn.LayerNorm(16), nn.Linear(16, 4)
        self.add_up, self.factor, self.returns_all = add_up, factor, returns_all

    def forward(self, x: torch.Tensor) -> object:
        made = self.add_up(self.one(x), self.two(x), self.three(x))
        y = self.out(self.norm(made) * self.factor)
        return (y, self.first) if self.returns_all else y


def first_two(a: torch.Tensor, b: torch.Tensor, c: torch.Tensor) -> torch.Tensor:
    return (a + b) + c


def last_two(a: torch.Tensor, b: torch.Tensor, c: torch.Tensor) -> torch.Tensor:
    return a + (b + c)


def outer_two(a: torch.Tensor, b: torch.Tensor, c: torch.Tensor) -> torch.Tensor:
    return (a + c) + b


def in_place(a: torch.Tensor, b: torch.Tensor, c: torch.Tensor) -> torch.Tensor:
    filled = torch.zeros_like(a)
    for part in (c, b, a):
        filled += part
    return filled


def gathered(a: torch.Tensor, b: torch.Tensor, c: torch.Tensor) -> torch.Tensor:
    """Fills memory from the end on."""
    filled = torch.full((3, *a.shape), 7.0)
    for row, part in ((2, c), (1, b), (0, a)):
        filled[row] = part
    return filled.sum(0)


def stacked(a: torch.Tensor, b: torch.Tensor, c: torch.Tensor) -> torch.Tensor:
    """Fills memory from the beginning on."""
    filled = torch.full((3, *a.shape), -7.0)
    for row, part in enumerate((a, b, c)):
        filled[row] = part
    return filled.sum(0)


OTHERS = {
    "another order": (first_two, outer_two),
    "from the end on": (first_two, last_two),
    "in place": (first_two, in_place),
    "filled in another order": (stacked, gathered),
}

CAPTURES = {
    "hashes": modtrace.Capture(roles=["output", "op_output", "leaf"], hash=True, sketch=True),
    "tensors": modtrace.Capture(roles=["output", "op_output", "leaf"], tensors=True),
    "statistics": modtrace.Capture(roles=["output", "op_output", "leaf"]),
}


def record(model: nn.Module, capture: str) -> modtrace.Recording:
    with modtrace.record(model, ops=True, values=CAPTURES[capture], strict=True) as rec:
        model(torch.arange(8))
    return rec


@pytest.mark.parametrize("capture", CAPTURES)
@pytest.mark.parametrize("name", OTHERS)
def test_other_order_of_sums_is_no_place(name: str, capture: str) -> None:
    one, other = (record(Sums(add_up), capture) for add_up in OTHERS[name])
    found = modtrace.compare(one, other, allow_missing=True)
    assert found.first is None and found.ok, str(found)
    assert found.compared == found.equal + found.within + found.absorbed


@pytest.mark.parametrize("capture", CAPTURES)
@pytest.mark.parametrize("name", OTHERS)
def test_fault_behind_another_order_of_sums_is_the_place(name: str, capture: str) -> None:
    one, other = OTHERS[name]
    found = modtrace.compare(
        record(Sums(one), capture), record(Sums(other, 1.5), capture), allow_missing=True
    ).first
    assert found is not None
    assert (found.op, found.path) in {("aten.mul.Tensor", ""), ("aten.addmm.default", "out")}


def test_what_the_model_returns_is_a_place_though_it_is_equal_again_elsewhere() -> None:
    def keep(add_up: Sum) -> Sums:
        model = Sums(add_up, returns_all=True)

        def with_first(a: torch.Tensor, b: torch.Tensor, c: torch.Tensor) -> torch.Tensor:
            model.first = a + b if add_up is first_two else a + c
            return model.first + (c if add_up is first_two else b)

        model.add_up = with_first
        return model

    found = modtrace.compare(keep(first_two), keep(outer_two), (torch.arange(8),))
    assert found.first is not None and found.first.op == "aten.add.Tensor"
    assert found.absorbed == 0


def test_what_the_program_reads_is_a_place() -> None:
    def read(add_up: Sum) -> modtrace.Recording:
        def looking(a: torch.Tensor, b: torch.Tensor, c: torch.Tensor) -> torch.Tensor:
            first = a + b if add_up is first_two else a + c
            first.sum().item()
            return first + (c if add_up is first_two else b)

        return record(Sums(looking), "tensors")

    assert modtrace.compare(read(first_two), read(outer_two)).first is not None


class Working(nn.Module):
    """Returns the mean of the rows, and leaves what it worked with in the second output of its op."""

    def __init__(self, left: float, factor: float = 1.0) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.inner, self.left, self.factor = nn.Linear(8, 8), left, factor

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        made, _ = torch.ops.modtrace_tests.mean_of_rows(self.inner(x) * self.factor, self.left)
        return made * 2


@torch.library.custom_op("modtrace_tests::mean_of_rows", mutates_args=())
def mean_of_rows(x: torch.Tensor, left: float) -> tuple[torch.Tensor, torch.Tensor]:
    return x.mean(0), torch.full((5,), left)


@pytest.mark.parametrize("capture", CAPTURES)
def test_workspace_that_nobody_reads_is_no_place_and_a_fault_beside_it_is(capture: str) -> None:
    def run(model: nn.Module) -> modtrace.Recording:
        with modtrace.record(model, ops=True, values=CAPTURES[capture], strict=True) as rec, torch.no_grad():
            model(torch.arange(24.0).reshape(3, 8))
        return rec

    found = modtrace.compare(run(Working(1.0)), run(Working(2.0)))
    assert found.ok and found.absorbed == 1, str(found)
    faulty = modtrace.compare(run(Working(1.0)), run(Working(2.0, 1.25))).first
    assert faulty is not None and faulty.op == "aten.mul.Tensor"
