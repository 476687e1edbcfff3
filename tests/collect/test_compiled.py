"""torch.compile does the same under a recording: same bits, same graphs, no break and no recompilation more."""

from collections.abc import Callable, Iterator
from contextlib import nullcontext
from typing import Any, NamedTuple

import pytest
import torch
import torch._dynamo
import torch.nn.functional as F
from torch import nn
from torch._dynamo.utils import counters

import modtrace
from helpers.twins import _bits, state
from zoo import TiedGPT

BACKENDS = pytest.mark.parametrize("backend", ["eager", "aot_eager"])


@pytest.fixture(autouse=True)
def fresh_dynamo() -> Iterator[None]:
    """Nothing compiled before is known, nor stays known."""
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


class Outcome(NamedTuple):
    """What a run computed, and what Dynamo did for it."""

    bits: list[Any]
    frames: dict[str, int]
    stats: dict[str, int]
    breaks: dict[str, int]
    recompiled: int


class Step:
    """A compiled GPT with its optimizer; called, it trains one step."""

    def __init__(self, backend: str, *, fullgraph: bool = False, per_block: bool = False) -> None:
        torch.manual_seed(0)
        self.model = TiedGPT()
        self.called: Callable[..., Any] = self.model
        if per_block:
            for block in self.model.blocks:
                block.compile(backend=backend, fullgraph=fullgraph)
        else:
            self.called = torch.compile(self.model, backend=backend, fullgraph=fullgraph)
        self.optimizer = torch.optim.AdamW(self.model.parameters())

    def __call__(self, batch: int = 2) -> torch.Tensor:
        tokens = torch.randint(0, 17, (batch, 8))
        self.optimizer.zero_grad()
        loss = F.cross_entropy(self.called(tokens).flatten(0, 1), tokens.flatten())
        loss.backward()
        self.optimizer.step()
        return loss.detach()


def outcome(make: Callable[[], Step], recorded: bool, before: int, inside: int, after: int) -> Outcome:
    """So many steps before, inside and after a recording; or the same steps without one."""
    torch._dynamo.reset()
    counters.clear()
    step = make()
    torch.manual_seed(1)
    losses = [step() for _ in range(before)]
    recording = modtrace.record(strict=True, backward_times=True) if recorded else None
    with recording or nullcontext():
        losses += [step() for _ in range(inside)]
    losses += [step() for _ in range(after)]
    if recording is not None:
        assert recording.meta.marks == ()
    return Outcome(
        [_bits(each) for each in torch.utils._pytree.tree_leaves([losses, state(step.model)])],
        dict(counters["frames"]),
        dict(counters["stats"]),
        dict(counters["graph_break"]),
        sum(counters["recompiles"].values()),
    )


def assert_same(make: Callable[[], Step], *, before: int, inside: int, after: int) -> Outcome:
    plain = outcome(make, False, before, inside, after)
    recorded = outcome(make, True, before, inside, after)
    assert recorded == plain
    assert plain.frames["ok"] > 0
    return plain


@BACKENDS
def test_model_compiled_inside_the_recording_is_compiled_alike(backend):
    done = assert_same(lambda: Step(backend), before=0, inside=3, after=2)
    print(done)
    assert done.breaks == {}


@BACKENDS
def test_model_compiled_before_the_recording_runs_on_as_it_was(backend):
    done = assert_same(lambda: Step(backend), before=2, inside=3, after=2)
    assert done.breaks == {}


@BACKENDS
def test_a_full_graph_stays_one_graph(backend):
    done = assert_same(lambda: Step(backend, fullgraph=True), before=0, inside=3, after=2)
    assert done.stats["unique_graphs"] == 1


@BACKENDS
@pytest.mark.parametrize("before", [0, 2])
def test_blocks_compiled_by_themselves_are_compiled_alike(backend, before):
    done = assert_same(lambda: Step(backend, per_block=True), before=before, inside=3, after=2)
    assert done.breaks == {}


def test_compiled_function_is_still_compiled_afterwards():
    ran = []

    def backend(graph, inputs):
        ran.append("compiled")

        def run(*args):
            ran.append("ran")
            return graph(*args)

        return run

    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh())
    compiled = torch.compile(model, backend=backend)
    with modtrace.record(strict=True):
        compiled(torch.randn(3, 4))
    compiled(torch.randn(3, 4))
    compiled(torch.randn(3, 4))
    assert ran == ["compiled", "ran", "ran", "ran"]


