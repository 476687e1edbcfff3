"""`modtrace nonfinite`."""

import json
import math
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import modtrace
from builders import RecordingBuilder, TypedRecording
from helpers.command_line import Command
from modtrace.store.copy import write_recording


def recording(*outputs: float) -> TypedRecording:
    build = RecordingBuilder(argv=("train.py",), complete=True)
    net = build.module("", "Net")
    head = build.module("head", "Linear", parent=net)
    build.step(4, 0, 100)
    call = build.call(head, 10, 20, parent=build.call(net, 0, 90, nth=0), nth=0)
    if outputs:
        build.output(call, outputs)
    return build.data()


@pytest.fixture
def folder(tmp_path: Path) -> str:
    return str(tmp_path / "run.modtrace")


def test_finding_something_is_exit_code_1(command: Command, folder: str) -> None:
    write_recording(recording(1.0, float("nan")), folder)

    assert command("nonfinite", folder, code=1).out == (
        "first non-finite values: 1 NaN in step 4, forward\n  output of head in Net, 2 elements\n"
        "  try: record(ops=True) (modtrace record --ops), on a long run with keep_last=20 (--keep-last 20), "
        "names the op that made them; this module may only have been given them\n"
    )


def test_finite_values_are_exit_code_0(command: Command, folder: str) -> None:
    write_recording(recording(1.0), folder)

    assert command("nonfinite", folder).out == "no non-finite values in 1 measured tensors of 1 step\n"


def test_infinities_that_were_meant_are_said_to_be_what_the_module_tree_has_marked(
    command: Command, folder: str
) -> None:
    class Mask(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.full_like(x, -math.inf).triu(1)

    class Masked(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.mask = Mask()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return (x + self.mask(x)).softmax(-1)

    model = Masked()
    with modtrace.record(model, to=folder, ops=True):
        model(torch.ones(4, 4))

    assert "NaN or infinite values in step 0; do they matter? modtrace nonfinite" in " ".join(
        command("show", folder).out.split()
    )
    told = " ".join(command("nonfinite", folder).out.split())
    assert re.fullmatch(
        r"no non-finite values that matter, in \d+ measured tensors of 1 step: what \d+ tensors hold came to "
        r"no loss, gradient, parameter or returned output, or no optimizer used it \(--all lists who made it\)",
        told,
    )


def test_json_has_what_was_found_and_how_much_was_measured(command: Command, folder: str) -> None:
    write_recording(recording(float("inf")), folder)

    found = json.loads(command("nonfinite", folder, "--json", code=1).out)
    assert (found["first"]["path"], found["first"]["step"], found["first"]["inf_count"]) == ("head", 4, 1)
    assert found["measured"] == {
        "tensors": 1,
        "unmeasured": 0,
        "steps": 1,
        "last_step": 4,
        "nonfinite": 1,
        "recorded_steps": 1,
        "chosen_steps": None,
        "held": None,
    }
    assert found["marks"] == []


def record_healthy(folder: str, **options: Any) -> None:
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with modtrace.record(model, to=folder, **options):
        for _ in range(4):
            model(torch.ones(1, 2)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()


def test_steps_that_were_looked_at_and_dropped_are_exit_code_0(command: Command, folder: str) -> None:
    record_healthy(folder, keep_last=2)

    assert command("nonfinite", folder).out == (
        "no non-finite values in modules: no trigger fired; 4 steps were held and dropped\n"
    )
    assert modtrace.open_recording(folder).first_nonfinite() is None


def test_steps_that_nobody_looked_at_before_they_were_dropped_are_exit_code_2(
    command: Command, folder: str
) -> None:
    record_healthy(folder, keep_last=2, triggers=[modtrace.Above("rms", 1e9)])

    assert "no trigger fired; 4 steps were held and dropped" in command("nonfinite", folder, code=2).err


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"steps": "0:2"}, "of 2 steps (of steps 0:2; no others were recorded)\n"),
        ({"values": modtrace.Capture(steps="::2")}, "of 2 of 4 steps\n"),
    ],
)
def test_steps_that_were_not_looked_at_are_told(
    command: Command, options: dict[str, Any], expected: str, folder: str
) -> None:
    record_healthy(folder, **options)

    assert command("nonfinite", folder).out.endswith(expected)
