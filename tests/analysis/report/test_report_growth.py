"""A report of very many calls takes the Python of few: calls are columns until those that are shown are chosen."""

import tracemalloc

import pytest
import torch
from torch import nn

import modtrace
from helpers.growth import count_lines
from modtrace.analysis.modules.module_tree import build_module_tree
from modtrace.analysis.report.limits import Limits
from modtrace.analysis.report.report import build_report
from modtrace.recording.protocols import RecordingData


class Repeated(nn.Module):
    """Calls blocks of a list, which the graph folds, and a leaf, again and again."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self.count, self.leaf = count, nn.Identity()
        self.blocks = nn.ModuleList(nn.Sequential(nn.ReLU()) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for _ in range(self.count):
            x = self.leaf(x)
            for block in self.blocks:
                x = block(x)
        return x


def record(count: int) -> RecordingData:
    model = Repeated(count)
    with modtrace.record(model, strict=True) as recording:
        model(torch.ones(1))
    return recording


@pytest.mark.parametrize("asked", ["module tree", "report"])
def test_ten_times_the_calls_of_a_module_take_no_more_lines(asked: str) -> None:
    def answer(data: RecordingData) -> object:
        if asked == "module tree":
            return build_module_tree(data)
        return build_report(data, Limits(nodes=20, spans=20, values=20, histograms=20))

    def lines(count: int) -> int:
        data = record(count)
        return count_lines(lambda: answer(data))

    lines(10)  # imports and caches
    assert lines(1_000) < 1.2 * lines(100)


def test_report_takes_at_most_370_bytes_for_each_call_of_a_module() -> None:
    """These are 46 columns of 8 bytes. Costs that no graph of calls knows are one column, and not four."""

    def peak_bytes(count: int) -> int:
        data = record(count)
        limits = Limits(nodes=20, spans=20, values=20, histograms=20)
        build_report(data, limits)  # imports and caches
        tracemalloc.start()
        try:
            build_report(data, limits)
            return tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()

    calls = 7 * (2_000 - 200)  # the leaf, and three containers with what they hold
    assert (peak_bytes(2_000) - peak_bytes(200)) / calls < 370
