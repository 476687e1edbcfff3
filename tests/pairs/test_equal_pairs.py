"""Runs that compute the same in two ways are equal, or apart by noise."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import nn

import modtrace
from helpers.equal_blocks import EQUAL_BLOCKS, TIME, WIDTH, Around, Block

#: What is known of each tensor, and its dtype.
MEASURED = {
    "sketches": (modtrace.Capture(roles="all", hash=True, sketch=True), torch.float32),
    "statistics": (modtrace.Capture(), torch.float32),
    "sketches, bfloat16": (modtrace.Capture(roles="all", hash=True, sketch=True), torch.bfloat16),
}

#: In bfloat16 these are apart: the fused LSTM rounds its states less often, and squares cancel.
TOO_COARSE = {"LSTM by hand", "variance"}

#: The gradients of the initial state, which nothing reads, are those of one step in one run, and of all in the other.
NOT_YET = {("LSTM step by step", "sketches"), ("LSTM step by step", "sketches, bfloat16")}


def train(block: Block, capture: modtrace.Capture, dtype: torch.dtype) -> modtrace.Recording:
    model = Around(block).to(dtype)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    x = torch.randn(3, TIME, WIDTH, generator=torch.Generator().manual_seed(1)).to(dtype)
    with modtrace.record(model, ops=True, values=capture, strict=True) as rec:
        for _ in range(2):
            model(x).float().square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    return rec


@pytest.mark.parametrize(
    ("name", "measured"),
    [
        pytest.param(
            name, measured, marks=[pytest.mark.xfail(strict=True)] if (name, measured) in NOT_YET else []
        )
        for name in EQUAL_BLOCKS
        for measured in MEASURED
        if name not in TOO_COARSE or "bfloat16" not in measured
    ],
)
def test_block_written_in_another_way_is_equal(name: str, measured: str) -> None:
    one, other = (train(block, *MEASURED[measured]) for block in EQUAL_BLOCKS[name])
    for found in (
        modtrace.compare(one, other, allow_missing=True),
        modtrace.compare(other, one, allow_missing=True),
    ):
        assert found.ok and found.first is None, str(found)


def infer_on_threads(seed: int = 0) -> modtrace.Recording:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8)).eval()

    def answer(number: int) -> torch.Tensor:
        with torch.no_grad():
            return model(torch.full((64, 8), float(number)))

    with modtrace.record(model, strict=True) as rec, ThreadPoolExecutor(3) as pool:
        list(pool.map(answer, range(40)))
    return rec


def replace_module() -> modtrace.Recording:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 1))
    with modtrace.record(model, ops=True, strict=True) as rec:
        for step in range(4):
            if step == 2:
                model[1] = nn.Tanh()
            model(torch.ones(2, 4)).sum().backward()
            model.zero_grad()
    return rec


def use_workspace() -> modtrace.Recording:
    """The loss leaves memory behind that it has not written: probabilities beyond the length of a target."""
    torch.manual_seed(0)
    model = nn.Linear(8, 6)
    with modtrace.record(
        model, ops=True, values=modtrace.Capture(roles="all", hash=True), strict=True
    ) as rec:
        scores = model(torch.randn(9, 3, 8)).log_softmax(-1)
        lengths, wanted = torch.tensor([9, 6, 4]), torch.tensor([4, 2, 1])
        nn.functional.ctc_loss(scores, torch.randint(1, 6, (3, 4)), lengths, wanted).backward()
    return rec


@pytest.mark.parametrize("run", [infer_on_threads, replace_module, use_workspace])
def test_run_equals_the_same_run(run: Callable[[], modtrace.Recording]) -> None:
    first = run()
    for _ in range(3):
        found = modtrace.compare(first, run())
        assert found.ok and found.first is None, str(found)


def test_each_call_on_several_threads_is_a_step_of_its_own() -> None:
    calls = infer_on_threads().table("calls").to_pandas()
    assert calls.groupby("step").size().tolist() == [4] * 40
    assert calls["thread"].nunique() > 1


def test_other_weights_are_told_where_steps_ran_on_several_threads() -> None:
    found = modtrace.compare(infer_on_threads(), infer_on_threads(seed=1))
    assert not found.ok and found.first is not None
    assert found.first.path == "0" and found.equal == 0
