"""What differs between steps of each module: the same numbers as a report of each step alone has."""

from pathlib import Path

import numpy as np
import pytest
import torch

import modtrace
from builders import RecordingBuilder
from helpers.report_tables import ALL, column, report
from helpers.typed_steps import typed_net
from modtrace.analysis.report.limits import Limits
from modtrace.api.recording import open_recording


class Tied(torch.nn.Module):
    """Three equal blocks between an embedding and a head that share a weight; it returns two tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = torch.nn.Embedding(8, 4)
        self.blocks = torch.nn.ModuleList(torch.nn.Sequential(torch.nn.Linear(4, 4)) for _ in range(3))
        self.head = torch.nn.Linear(4, 8, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        hidden = self.embed(tokens)
        for block in self.blocks:
            hidden = block(hidden)
        logits = self.head(hidden)
        return logits, logits.mean()


def test_in_each_step_modules_have_the_numbers_that_a_report_of_this_step_alone_has(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = Tied()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with modtrace.record(model, tmp_path / "run", backward_times=True):
        for step in range(4):
            optimizer.zero_grad()
            loss = model(torch.randint(8, (2, 3)))[1] * (float("nan") if step == 3 else 1.0)
            loss.backward()
            optimizer.step()
    data = open_recording(tmp_path / "run").data
    tables = report(data, step=0).tables
    assert column(tables["module_steps"], "step") == [0, 1, 2, 3]
    compared = set()
    for step in range(4):
        alone = report(data, step=step).tables["modules"]
        assert column(alone, "path") == column(tables["modules"], "path")
        for found in tables["module_series"].columns:
            known = [each.values for each in alone.columns if each.name == found.name]
            expected = known[0].astype(np.float64) if known else np.full(alone.rows, np.nan)
            np.testing.assert_allclose(found.values.reshape(-1, 4)[:, step], expected, rtol=2**-15)
            compared.add(found.name)
    assert compared > {"time", "self_time.forward", "RMS", "gradient_norm", "parameter_RMS", "nonfinite"}


def test_a_module_that_did_not_run_in_a_step_has_no_numbers_of_it() -> None:
    build, net = typed_net(complete=True)
    for step in range(3):
        build.step(step, 1000 * step, 1000 * step + 900)
        if step != 1:
            build.output(build.call(net, 1000 * step, 1000 * step + 500, nth=0), [2.0, 2.0])
        else:
            build.call(build.module("other", "Other", parent=net), 1000, 1200, nth=0)
    tables = report(build.data()).tables
    series = tables["module_series"]
    times = [pytest.approx(time, rel=2**-15) for time in (5e-7, 2e-7, 5e-7)]
    assert column(series, "time.forward")[:3] == times
    assert column(series, "RMS")[:3] == [2.0, None, 2.0]
    assert column(series, "nonfinite")[:3] == [0, None, 0]


def test_steps_are_kept_evenly_within_the_room_with_the_shown_one_and_none_of_a_single_step() -> None:
    def steps(count: int, room: int) -> list[int]:
        build, net = typed_net(complete=True)
        for step in range(count):
            build.step(step, 1000 * step, 1000 * step + 900)
            build.call(net, 1000 * step, 1000 * step + 500, nth=0)
        limits = Limits(nodes=ALL.nodes, spans=ALL.spans, values=room, histograms=ALL.histograms)
        tables = report(build.data(), limits, step=min(2, count - 1)).tables
        return column(tables["module_steps"], "step") if "module_steps" in tables else []

    assert steps(7, 10**6) == [0, 1, 2, 3, 4, 5, 6]
    assert steps(7, 30) == [0, 2, 3, 6]
    assert len(steps(200, 10**6)) == 51
    assert steps(1, 10**6) == []
    assert "module_steps" not in report(RecordingBuilder(complete=True).data()).tables
