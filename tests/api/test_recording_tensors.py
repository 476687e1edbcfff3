"""Whole tensors of a real run are read back by their place, while it runs and afterwards."""

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import modtrace
from modtrace.api.live import LiveRecording
from modtrace.api.recording import Recording
from modtrace.errors import RecordingError
from modtrace.store.tensor_shards import TensorShards


class Recorded:
    """Three steps of a small model, with what its first module has returned."""

    def __init__(self, to: Path | None) -> None:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 3), nn.ReLU()).to(torch.bfloat16)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        self.outputs: list[Tensor] = []
        self.weights: list[Tensor] = []
        self.seen: list[Tensor] = []  # through the recording, while it runs
        kept = modtrace.Capture(roles=("output", "parameter"), tensors=True)
        model[0].register_forward_hook(lambda *args: self.outputs.append(args[2].detach().clone()))
        with modtrace.record(model, to=to, values=kept, strict=True) as self.rec:
            for step in range(3):
                self.weights.append(model[0].weight.detach().clone())
                model(torch.randn(2, 4, dtype=torch.bfloat16)).sum().backward()
                optimizer.step()
                optimizer.zero_grad()
                self.rec.step()
                self.seen.append(self.rec.tensor("0", step))

    def check(self, rec: Recording) -> None:
        for step in range(3):
            assert same(rec.tensor("0", step), self.outputs[step])
            assert same(rec.tensor("0.weight", step, role="parameter"), self.weights[step])
        assert [step for step, _ in rec.tensors("1")] == [0, 1, 2]


def same(one: Tensor, other: Tensor) -> bool:
    return one.dtype == other.dtype and torch.equal(one.view(torch.int16), other.view(torch.int16))


@pytest.fixture(params=[True, False], ids=["folder", "memory"])
def recorded(request: pytest.FixtureRequest, tmp_path: Path, seeded: None) -> Recorded:
    return Recorded(tmp_path / "run.modtrace" if request.param else None)


def test_tensors_are_those_of_the_run(recorded: Recorded) -> None:
    recorded.check(recorded.rec)
    assert recorded.rec.meta.marks == ()


def test_tensors_are_read_while_the_run_goes_on(recorded: Recorded) -> None:
    assert all(map(same, recorded.seen, recorded.outputs))


def test_copy_has_them_too(recorded: Recorded, tmp_path: Path) -> None:
    recorded.rec.write(tmp_path / "copy.modtrace")
    recorded.check(modtrace.open_recording(tmp_path / "copy.modtrace"))


def test_whole_tensors_that_are_still_to_be_written_are_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seeded: None
) -> None:
    """The thread that writes them does so only when somebody waits."""
    asked = threading.Event()
    write, wait = TensorShards._write, TensorShards.wait

    def write_if_asked(shards: TensorShards, batch: Any) -> None:
        asked.wait()
        write(shards, batch)

    def ask(shards: TensorShards) -> None:
        asked.set()
        wait(shards)

    monkeypatch.setattr(TensorShards, "_write", write_if_asked)
    monkeypatch.setattr(TensorShards, "wait", ask)
    model, kept = nn.Linear(4, 3), modtrace.Capture(roles="output", tensors=True)
    readers: list[Callable[[LiveRecording, int], Any]] = [
        lambda rec, step: rec.tensor("", step),
        lambda rec, step: next(iter(rec.tensors("", steps=[step])))[1],
        lambda rec, step: torch.from_numpy(rec.stack("", step).values[0]),
        lambda rec, step: copied(rec, tmp_path / "copy.modtrace").tensor("", step),
    ]
    with modtrace.record(model, to=tmp_path / "run.modtrace", values=kept, strict=True) as rec:
        try:
            for step, read in enumerate(readers):
                with torch.no_grad():
                    output = model(torch.randn(2, 4))
                rec.step()
                assert torch.equal(read(rec, step), output)
                asked.clear()
        finally:
            asked.set()


def copied(rec: Recording, to: Path) -> Recording:
    rec.write(to)
    return modtrace.open_recording(to)


def run_with_little_room(to: Path | None, numbers: int) -> Recording:
    """Three steps that return so many numbers of four bytes each."""
    model, kept = nn.ReLU(), modtrace.Capture(roles="output", tensors=True)
    room = modtrace.TensorOptions(max_bytes=4096, when_full="drop")
    with modtrace.record(model, to=to, values=kept, tensors=room, strict=True) as rec:
        for step in range(3):
            model(torch.full((numbers,), float(step)))
            rec.step()
    return rec


def test_in_memory_the_newest_tensors_that_there_is_room_for_are_kept() -> None:
    rec = run_with_little_room(None, 1024)
    assert rec.tensor("", 2).tolist() == [2.0] * 1024
    with pytest.raises(RecordingError):
        rec.tensor("", 1)
    assert len(rec.meta.marks) == 1


def test_in_a_folder_a_tensor_that_is_larger_than_the_room_is_left_out(tmp_path: Path) -> None:
    rec = run_with_little_room(tmp_path / "run.modtrace", 2048)
    with pytest.raises(
        ValueError, match=r"^no whole tensors are in this recording\. .*were dropped from step 0"
    ):
        rec.tensor("", 2)
    assert len(rec.meta.marks) == 1


def test_options_of_tensors_that_are_none_are_refused() -> None:
    with pytest.raises(TypeError, match=r"^tensors=4096: give modtrace\.TensorOptions\(\.\.\.\)$"):
        modtrace.record(nn.ReLU(), tensors=4096)
