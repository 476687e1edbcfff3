"""`modtrace timeline`, on recordings typed by hand and on the example that trains a GPT."""

import contextlib
import json
import runpy
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from builders import RecordingBuilder, TypedRecording
from helpers.command_line import Command, run_command
from helpers.trace_events import arrows, find_faults, inside, lanes, load, spans
from helpers.whole_text import render_perfetto
from modtrace.analysis.timeline.timeline import build_timeline
from modtrace.recording.protocols import RecordingData
from modtrace.store.copy import write_recording

GPT = Path(__file__).parent.parent.parent / "examples" / "train_gpt.py"
SIZES = {"layers": 2, "width": 32, "heads": 2, "context": 16, "batch": 2, "steps": 2, "print-every": 9}

NO_BACKWARD = (
    "no backward calls are shown: when they began and ended was not recorded. "
    "Record with backward_times=True or ops=True (modtrace record --backward-times or --ops).\n"
)


def recording(*, backward: bool = True, ops: bool = True) -> TypedRecording:
    build = RecordingBuilder(argv=("train.py",), complete=True)
    net = build.module("", "Net")
    for step in range(3):
        build.step(step, 10_000 * step, 10_000 * step + 9_000)
        call = build.call(net, 10_000 * step, 10_000 * step + 5_000, nth=0)
        forward = build.op(call, "aten.relu.default", 10_000 * step, 10_000 * step + 500) if ops else None
        if backward:
            after = build.backward(call, 10_000 * step + 6_000, 10_000 * step + 7_000, nth=0)
            if ops:
                at = 10_000 * step + 6_100
                build.op(after, "aten.threshold_backward.default", at, at + 100, forward=forward)
    return build.data()


@pytest.fixture
def folder(tmp_path: Path) -> str:
    return write(recording(), tmp_path)


def write(data: RecordingData, tmp_path: Path) -> str:
    path = str(tmp_path / "run.modtrace")
    write_recording(data, path)
    return path


def test_writes_a_trace_and_says_where_to_open_it(command: Command, folder: str, tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    said = command("timeline", folder, "-o", str(path))
    assert said.out == (
        f"{path}: 29 events of 3 steps, 3.65kB. Open it at ui.perfetto.dev or chrome://tracing.\n"
    )
    assert said.err == ""
    trace = load(path.read_text())
    assert find_faults(trace) == []
    assert len(trace["traceEvents"]) == 29
    assert lanes(trace) == ["steps", "forward", "backward"]


@pytest.mark.parametrize("options", [[], ["-o", "-"], ["--json"]])
def test_trace_goes_to_standard_output_without_a_file(
    command: Command, options: list[str], folder: str
) -> None:
    trace = load(command("timeline", folder, *options).out)
    assert find_faults(trace) == []
    assert len(spans(trace)) == 15


def test_trace_is_not_printed_to_a_terminal_unasked(
    command: Command, folder: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    assert "give -o FILE, or -o - to print the trace" in command("timeline", folder, code=2).err


def test_what_was_written_is_told_as_json(command: Command, folder: str, tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    assert json.loads(command("timeline", folder, "-o", str(path), "--json", "--steps", "1:").out) == {
        "path": str(path),
        "events": 22,
        "steps": [1, 2],
        "size_bytes": path.stat().st_size,
        "missing": None,
        "marks": [],
    }


@pytest.mark.parametrize(
    ("options", "names"),
    [
        (["--step", "1", "--no-ops"], ["step 1", "Net", "Net"]),
        (["--steps", "0:3:2", "--no-ops"], ["step 0", "Net", "Net", "step 2", "Net", "Net"]),
        (["--step", "2"], ["step 2", "Net", "aten.relu.default", "Net", "aten.threshold_backward.default"]),
    ],
)
def test_steps_and_ops_can_be_chosen(
    command: Command, options: list[str], names: list[str], folder: str
) -> None:
    assert [each["name"] for each in spans(load(command("timeline", folder, *options).out))] == names


def test_arrows_between_ops_come_when_asked(command: Command, folder: str) -> None:
    found = [
        (each.source["name"], each.target["name"])
        for each in arrows(load(command("timeline", folder, "--step", "0", "--op-flows").out))
    ]
    assert found == [("Net", "Net"), ("aten.relu.default", "aten.threshold_backward.default")]


def test_missing_backward_times_are_told_beside_the_trace(command: Command, tmp_path: Path) -> None:
    folder = write(recording(backward=False, ops=False), tmp_path)
    said = command("timeline", folder)
    assert find_faults(load(said.out)) == []
    assert said.err == NO_BACKWARD


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--step", "7"], "Invalid value for --step: no step 7 in this recording; there are: 0..2"),
        (["--step", "-9"], "Invalid value for --step: no step -9 in this recording; there are: 0..2"),
        (["--steps", "5:9"], "no step of 5:9 in this recording; there are: 0..2"),
        (["--steps", "1"], "Invalid value for --steps: steps='1' is not START:STOP[:EVERY]"),
        (["--step", "1", "--steps", "0:1"], "give --step or --steps, not both"),
        (["--op-flows", "--no-ops"], "--op-flows are arrows between ops: leave --no-ops out"),
    ],
)
def test_wrong_option_is_misuse(command: Command, options: list[str], message: str, folder: str) -> None:
    assert message in command("timeline", folder, *options, code=2).err


@pytest.mark.parametrize("option", ["--ops", "--op-flows"])
def test_ops_that_were_not_recorded_cannot_be_asked_for(
    command: Command, option: str, tmp_path: Path
) -> None:
    folder = write(recording(ops=False), tmp_path)
    assert command("timeline", folder, option, code=2).err == (
        f"modtrace: error: {folder}: no ops were recorded. Record with ops=True (modtrace record --ops).\n"
    )


def test_path_that_cannot_be_written_is_one_line(command: Command, folder: str, tmp_path: Path) -> None:
    path = tmp_path / "gone" / "trace.json"
    assert command("timeline", folder, "-o", str(path), code=2).err == (
        f"modtrace: error: {path}: cannot be written: No such file or directory. Give another path.\n"
    )


def trace_of_gpt(
    options: dict[str, Any], script: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> dict[str, Any]:
    """What the command writes of a recorded training of the example."""
    from modtrace import record

    to, path = tmp_path / "gpt.modtrace", tmp_path / "gpt.json"
    train = runpy.run_path(str(GPT))["main"]
    with record(to=to, strict=True, **options):
        train([*(f"--{name}={size}" for name, size in SIZES.items()), *script])
    assert (
        run_command(
            monkeypatch, "timeline", str(to), "-o", str(path), *(["--op-flows"] if options.get("ops") else [])
        )
        == 0
    )
    return load(path.read_text())


CHECKPOINTS = pytest.mark.parametrize(
    "script", [[], ["--checkpoint", "non-reentrant"], ["--checkpoint", "reentrant"]], ids=" ".join
)


@CHECKPOINTS
@pytest.mark.parametrize(
    "options", [{"ops": True}, {"backward_times": True}, {}], ids=["ops", "backward times", "forward only"]
)
def test_trace_of_a_real_training_is_valid_and_its_arrows_join_what_belongs_together(
    options: dict[str, Any],
    script: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    trace = trace_of_gpt({"values": None, **options}, script, tmp_path, monkeypatch)
    assert find_faults(trace) == []
    assert lanes(trace) == [
        "steps",
        "forward",
        *(["recompute"] if script else []),
        *(["backward"] if options else []),
        "optimizer",
        *(["outside of modules"] if options.get("ops") else []),
    ]
    calls = [each for each in spans(trace) if each["cat"] == "call"]
    by_phase = {
        phase: sum(each["args"]["phase"] == phase for each in calls)
        for phase in ("forward", "backward", "recompute", "optimizer")
    }
    assert by_phase == {
        "forward": 50,
        "backward": 50 if options else 0,
        "recompute": 40 if script else 0,
        "optimizer": 2,
    }
    joined = [each for each in arrows(trace) if each.source["cat"] == "call"]
    assert len(joined) == by_phase["backward"] + by_phase["recompute"]
    assert all(each.name == each.target["args"]["phase"] for each in joined)
    assert all(each.source["name"] == each.target["name"] for each in joined)
    assert all("unfinished" not in each["args"] for each in spans(trace))
    assert (NO_BACKWARD in capsys.readouterr().err) is (not options)


def test_modules_and_ops_of_a_real_training_lie_inside_each_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trace = trace_of_gpt({"values": None, "ops": True}, [], tmp_path, monkeypatch)
    mlp = next(each for each in spans(trace) if each["name"] == "blocks.1.mlp")
    assert [each["name"] for each in inside(trace, mlp) if each["cat"] == "call"] == [
        "blocks.1.mlp.fc",
        "blocks.1.mlp.gelu",
        "blocks.1.mlp.proj",
    ]
    assert {each["args"]["call"] for each in inside(trace, mlp) if each["cat"] == "op"} == {
        "blocks.1.mlp.fc",
        "blocks.1.mlp.gelu",
        "blocks.1.mlp.proj",
    }


def train_on_threads() -> None:
    import torch
    from torch import nn

    model = nn.Sequential(nn.Linear(3, 3), nn.Tanh())

    def train() -> None:
        for _ in range(2):
            model(torch.ones(2, 3)).sum().backward()

    threads = [threading.Thread(target=train) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def step_with_closure() -> None:
    import torch

    model = torch.nn.Linear(3, 1)
    optimizer = torch.optim.LBFGS(model.parameters(), max_iter=2)

    def closure() -> Any:
        optimizer.zero_grad()
        loss = model(torch.ones(2, 3)).pow(2).mean()
        loss.backward()
        return loss

    optimizer.step(closure)


def take_turns() -> None:
    import torch
    from torch import nn

    class Yields(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(3, 3)

        def forward(self, x: Any) -> Any:
            for _ in range(2):
                yield self.layer(x)

    for left, right in zip(Yields()(torch.ones(2, 3)), Yields()(torch.ones(2, 3)), strict=True):
        (left + right).sum().backward()


def fail() -> None:
    import torch
    from torch import nn

    with contextlib.suppress(RuntimeError):
        nn.Sequential(nn.Linear(3, 3), nn.Linear(2, 2))(torch.ones(2, 3))


@pytest.mark.parametrize("run_model", [train_on_threads, step_with_closure, take_turns, fail])
@pytest.mark.parametrize("options", [{"ops": True}, {"backward_times": True}], ids=["ops", "backward times"])
def test_trace_of_an_unusual_run_is_valid_with_every_time_as_it_was_measured(
    options: dict[str, Any], run_model: Callable[[], None]
) -> None:
    from modtrace import record

    with record(values=None, strict=True, **options) as recording:
        run_model()
    trace = load(render_perfetto(build_timeline(recording.data, op_flows=True)))
    assert find_faults(trace) == []
    # Of two threads, each may be in a step of its own.
    may_overlap = {"step"} if run_model is train_on_threads else set()
    told = {name for each in spans(trace) if each["cat"] not in may_overlap for name in each["args"]}
    assert told.isdisjoint({"measured_start_ns", "measured_end_ns", "unfinished"})
    assert ("raised" in told) is (run_model is fail)
