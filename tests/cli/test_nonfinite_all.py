"""All that made NaN or infinite values: `rec.nonfinite()` and `modtrace nonfinite --all`."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import nn

import modtrace
from builders import RecordingBuilder
from helpers.command_line import Command
from modtrace.errors import NothingRecordedError


class Faulty(nn.Module):
    """Makes NaN in two places, of which a `nan_to_num` hides the first."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (x - 1).log().add(1).nan_to_num() + (x - 2).sqrt()


ABSORBED = "absorbed: log in Faulty made 6 NaN in step 0, forward; finite again behind nan_to_num in Faulty"


@pytest.fixture(scope="module")
def rec() -> modtrace.Recording:
    model = Faulty()
    with modtrace.record(model, ops=True) as rec:
        for _ in range(2):
            rec.step()
            model(torch.zeros(2, 3))
    return rec


@pytest.fixture
def folder(rec: modtrace.Recording, tmp_path: Path) -> str:
    rec.write(tmp_path / "run.modtrace")
    return str(tmp_path / "run.modtrace")


def test_each_that_made_such_values_is_found_in_order(rec: modtrace.Recording) -> None:
    found = list(rec.nonfinite())
    assert [(each.step, each.op, each.cause) for each in found] == [
        (0, "aten.sqrt.default", "root of a negative number"),
        (1, "aten.sqrt.default", "root of a negative number"),
    ]
    assert found[0] == rec.first_nonfinite()
    assert str(found[1]).startswith("first non-finite values: 6 NaN in step 1, forward")


def test_each_is_found_when_it_is_requested(rec: modtrace.Recording) -> None:
    found = rec.nonfinite()
    assert isinstance(found, Iterator)
    assert next(found).step == 0


def test_recording_without_values_has_nothing_to_go_through() -> None:
    with pytest.raises(NothingRecordedError):
        next(modtrace.Recording(RecordingBuilder().data()).nonfinite())


def test_modules_are_gone_through_step_by_step_where_no_ops_were_recorded() -> None:
    build = RecordingBuilder()
    net = build.module("", "Net")
    head = build.module("head", "Linear", parent=net)
    for step in range(3):
        build.step(step, 100 * step, 100 * step + 99)
        outer = build.call(net, 100 * step, 100 * step + 90, nth=0)
        inner = build.call(head, 100 * step + 1, 100 * step + 9, parent=outer, nth=0)
        bad = [float("nan")] if step else [0.0]
        build.output(inner, bad, order=1)
        build.output(outer, bad, order=2)
    found = list(modtrace.Recording(build.data()).nonfinite())
    assert [(each.step, each.path, each.op) for each in found] == [(1, "head", None), (2, "head", None)]


def test_command_prints_each_at_most_the_limit(command: Command, folder: str) -> None:
    lines = command("nonfinite", folder, "--all", code=1).out.splitlines()
    assert [line for line in lines if not line.startswith(" ")] == [
        "first non-finite values: 6 NaN in step 0, forward",
        "then: 6 NaN in step 1, forward",
        ABSORBED,
    ]
    lines = command("nonfinite", folder, "--all", "--limit", "1", code=1).out.splitlines()
    assert [line for line in lines if not line.startswith(" ")] == [
        "first non-finite values: 6 NaN in step 0, forward",
        ABSORBED,
        "1 shown, and there are more: --limit 10 shows more of them",
    ]


@pytest.mark.parametrize(("limit", "steps"), [("20", [0, 1]), ("2", [0, 1]), ("1", [0])])
def test_command_lists_each_in_json(command: Command, limit: str, steps: list[int], folder: str) -> None:
    answer = json.loads(command("nonfinite", folder, "--all", "--json", "--limit", limit, code=1).out)
    assert [each["step"] for each in answer["all"]] == steps
    assert answer["all"][0] == answer["first"]


def test_list_of_all_does_not_advise_to_list_all(command: Command, tmp_path: Path) -> None:
    class Twice(nn.Module):
        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            return (x - 1).log(), (x - 2).sqrt()

    model = Twice()
    with modtrace.record(model, tmp_path / "run", ops=True):
        model(torch.zeros(2, 3))
    assert (
        "  1 other place of this step made such values too: rec.nonfinite() (modtrace nonfinite --all)\n"
        in command("nonfinite", str(tmp_path / "run"), code=1).out
    )
    out = command("nonfinite", str(tmp_path / "run"), "--all", code=1).out
    assert "then: 6 NaN" in out
    assert "other place" not in out


def test_tensors_that_one_optimizer_step_wrote_are_shown_in_one(command: Command, tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, foreach=False)
    with modtrace.record(model, tmp_path / "run", ops=True):
        for scale in (1.0, -1.0, 1.0):
            optimizer.zero_grad()
            (model(torch.ones(1, 2)).square() * scale).sqrt().sum().backward()
            optimizer.step()
    out = command("nonfinite", str(tmp_path / "run"), "--all", code=1).out
    assert out.startswith(
        "first non-finite values: 2 NaN in step 1, after forward\n  made by sqrt outside of modules"
    )
    assert out[out.index("then:") :] == (
        "then: 12 NaN in step 2, forward\n"
        "  held by 4 parameters: 0.weight, 0.bias, 1.weight, 1.bias\n"
        "  of each: add_ wrote it in step 1, optimizer\n"
        "then: 12 NaN in step 2, optimizer\n"
        "  held by 4 tensors\n"
        "  of each: add_ wrote it in step 1, optimizer\n"
    )
