"""What a run recomputes differently from its own forward is told as that, in whichever of the two runs it is."""

from collections import OrderedDict

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

import modtrace
from helpers.pairs import Run, record, seeded
from modtrace.analysis.divergence.answer import Comparison


class Block(nn.Module):
    """Checkpoints a function of its own: the ops of the recompute belong to no module that is called again."""

    def __init__(self, mode: str) -> None:
        super().__init__()
        self.fc, self.mode = nn.Linear(8, 8), mode

    def draw(self, x: torch.Tensor) -> torch.Tensor:
        return F.dropout(self.fc(x).relu(), 0.5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        given = x.relu()  # is not recomputed, other than that in `draw`
        if self.mode == "plain":
            return self.draw(given)
        return checkpoint(self.draw, given, use_reentrant=False, preserve_rng_state=self.mode == "kept")


def recorded(mode: str, names: str = "01") -> modtrace.Recording:
    blocks = seeded(lambda: nn.Sequential(OrderedDict((name, Block(mode)) for name in names)))

    def work() -> None:
        torch.manual_seed(1)
        blocks(torch.randn(4, 8, requires_grad=True)).sum().backward()

    return record(Run(blocks, work))


@pytest.fixture(scope="module")
def plain() -> modtrace.Recording:
    return recorded("plain")


def told(found: Comparison) -> tuple[object, ...]:
    first = found.first
    return None if first is None else (first.path, first.op, first.phase, first.kind, first.recompute_of)


def test_recompute_that_equals_its_forward_is_no_difference(plain: modtrace.Recording) -> None:
    for pair in ((plain, recorded("kept")), (recorded("kept"), plain)):
        found = modtrace.compare(*pair)
        assert found.ok, str(found)
        assert found.compared == found.equal > 60


@pytest.mark.parametrize("run", ["first", "second"])
def test_other_draws_of_a_recompute_are_told_of_the_run_that_has_drawn_them(
    run: str, plain: modtrace.Recording
) -> None:
    pair = (recorded("lost"), plain) if run == "first" else (plain, recorded("lost"))
    found = modtrace.compare(*pair)
    assert told(found) == ("1", "aten.bernoulli_.float", "recompute", "made", run)
    assert [(each.path, each.op) for each in found.divergences] == [
        ("1", "aten.bernoulli_.float"),
        ("0", "aten.bernoulli_.float"),
    ]
    assert f"what the {run} run recomputes differs from its own forward" in str(found)
    rows = found.to_frame().query("phase == 'recompute' and beyond")
    assert set(rows["recompute_of"]) == {run}
    values = pair[run == "second"].frame("values")
    assert set(values["phase"][rows["row_a"]]) == {"forward"}
    assert set(values["phase"][rows["row_b"]]) == {"recompute"}


def test_recompute_of_a_run_with_other_names_is_told_by_the_names_of_the_first(
    plain: modtrace.Recording,
) -> None:
    found = modtrace.compare(plain, recorded("lost", "ab"), map={"0": "a", "1": "b"})
    assert told(found) == ("1", "aten.bernoulli_.float", "recompute", "made", "second")
    assert found.first is not None and found.first.other == "b"
