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
from modtrace.analysis.tables.calls import CallOrder
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


def record_ops(count: int) -> RecordingData:
    weight = torch.ones(4, requires_grad=True)
    with modtrace.record(ops=True, strict=True) as recording:
        x = torch.ones(4)
        for _ in range(count):
            x = torch.tanh(x * weight)
        x.sum().backward()
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


def test_calls_of_all_modules_are_nested_together(monkeypatch: pytest.MonkeyPatch) -> None:
    """Which calls of a module are inside others of it was asked for each module and phase, twice for a report."""
    asked = list[int]()
    read = CallOrder.outermost
    monkeypatch.setattr(CallOrder, "outermost", lambda self, rows: (asked.append(1), read(self, rows))[1])

    def times(count: int) -> int:
        model = nn.Sequential(*[nn.Sequential(nn.Linear(2, 2)) for _ in range(count)])
        with modtrace.record(model, strict=True) as recording:
            for _ in range(4):
                model(torch.ones(2)).sum().backward()
        asked.clear()
        build_report(recording, Limits(nodes=20, spans=20, values=20, histograms=20))
        return len(asked)

    assert times(20) == times(10)


@pytest.mark.parametrize(("rows", "most_bytes"), [("calls", 370), ("ops", 720)])
def test_report_takes_few_bytes_for_each_row(rows: str, most_bytes: int) -> None:
    """Of calls these are 46 columns of 8 bytes: costs that no graph of calls knows are one column, and not four.

    Of ops a third is the timeline, with the details of spans that the report has and no other.
    """

    def peak_bytes(data: RecordingData) -> int:
        limits = Limits(nodes=20, spans=20 if rows == "calls" else 100_000, values=20, histograms=20)
        build_report(data, limits)  # imports and caches
        tracemalloc.start()
        try:
            build_report(data, limits)
            return tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()

    few, many = map(record if rows == "calls" else record_ops, (200, 2_000))
    count = many.table(rows).num_rows - few.table(rows).num_rows
    assert (peak_bytes(many) - peak_bytes(few)) / count < most_bytes
