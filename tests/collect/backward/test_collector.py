"""Reading a graph neither wakes the garbage collector nor leaves it otherwise than it was."""

import gc
from collections.abc import Iterator

import pytest
import torch
from torch import nn

import modtrace


@pytest.fixture(params=[True, False], ids=["enabled", "disabled"])
def is_enabled(request: pytest.FixtureRequest) -> Iterator[bool]:
    if not request.param:
        gc.disable()
    yield request.param
    gc.enable()


class Chain(nn.Module):
    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        for _ in range(2_000):
            x = x.sin()
        return x, x.sum()


def test_collector_waits_until_a_graph_is_read(is_enabled: bool) -> None:
    model, x = Chain(), torch.ones(2, requires_grad=True)
    generations: list[int] = []
    seen: list[tuple[int, bool]] = []

    def count(phase: str, found: dict[str, int]) -> None:
        if phase == "start":
            generations.append(found["generation"])

    with modtrace.record(model, ops=True, values=None, strict=True) as rec:
        last, loss = model(x)
        last.register_hook(lambda gradient: seen.append((len(generations), gc.isenabled())))
        gc.collect()
        gc.callbacks.append(count)
        try:
            loss.backward()
        finally:
            gc.callbacks.remove(count)
    (collections, was_enabled), *more = seen
    # torch keeps its Python object of each node as long as the graph, and the collector counts these.
    assert collections <= 2_000 // gc.get_threshold()[0]
    assert (was_enabled, more) == (is_enabled, [])
    assert gc.isenabled() is is_enabled
    assert rec.table("ops").num_rows > 4_000
