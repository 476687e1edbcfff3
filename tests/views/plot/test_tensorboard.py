"""What TensorBoard reads of an exported recording."""

import math
import re
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import modtrace
from helpers.command_line import Command
from modtrace.views.plot.tensorboard import write_tensorboard

accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")

STEPS = 6


def train(bad_step: int | None = None, layers: int = 20) -> modtrace.Recording:
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(layers)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    capture = [modtrace.Capture(), modtrace.Capture(roles="output", stats=2)]
    with modtrace.record(model, values=capture, strict=True) as rec:
        for step in range(STEPS):
            loss = model(torch.ones(3, 4)).sum()
            rec.log(loss=-float(step), **{"lr/head": 0.5})
            if step == bad_step:
                loss = loss * math.nan
            loss.backward()
            if step != bad_step:
                optimizer.step()
            optimizer.zero_grad()
            rec.step()
    return rec


def read(folder: Path) -> Any:
    events = accumulator.EventAccumulator(
        str(folder), size_guidance=dict.fromkeys(("images", "histograms"), 0)
    )
    events.Reload()
    return events


def test_logged_numbers_keep_names_signs_and_steps(tmp_path: Path) -> None:
    rec = train()
    write_tensorboard(rec.data, tmp_path)
    events = read(tmp_path)
    assert [(event.step, event.value) for event in events.Scalars("loss")] == [
        (n, -float(n)) for n in range(STEPS)
    ]
    assert [event.value for event in events.Scalars("lr/head")] == STEPS * [0.5]
    times = [event.wall_time for event in events.Scalars("modtrace/step_ms")]
    assert times == sorted(times) and times[0] > 1.7e9
    tag = next(tag for tag in events.Tags()["scalars"] if re.fullmatch(r"outputs, rms/\d+", tag))
    values = rec.history(path=tag.rpartition("/")[2], stat="rms").values[:, 0].tolist()
    assert [event.value for event in events.Scalars(tag)] == pytest.approx(values, rel=1e-6)


def test_few_curves_are_written_and_all_sites_are_in_the_picture(tmp_path: Path) -> None:
    write_tensorboard(train().data, tmp_path)
    events, counts = read(tmp_path), dict[str, int]()
    for tag in events.Tags()["scalars"]:
        counts[tag.split("/")[0]] = counts.get(tag.split("/")[0], 0) + 1
    assert counts["outputs, rms"] == counts["gradients of parameters, rms"] == 12
    [picture] = events.Images("outputs/rms of all")
    assert picture.encoded_image_string.startswith(b"\x89PNG") and picture.height > 400
    assert not any("losses" in tag for tag in events.Tags()["images"] + events.Tags()["histograms"])


def test_sites_that_are_not_finite_come_first(tmp_path: Path) -> None:
    write_tensorboard(train(bad_step=4).data, tmp_path)
    events = read(tmp_path)
    counts = [event.value for event in events.Scalars("modtrace/gradients at outputs that are not finite")]
    assert counts[:4] == [0.0] * 4 and counts[4] == 21.0  # with the model's own output
    shown = [tag for tag in events.Tags()["scalars"] if tag.startswith("gradients at outputs, rms/")]
    # Those of the last layers are the first to be so.
    assert {tag.rpartition("/")[2] for tag in shown} == {"Sequential", *map(str, range(9, 20))}
    assert all(math.isnan(events.Scalars(tag)[4].value) for tag in shown)


def test_histograms_have_the_percentage_of_numbers_by_magnitude(tmp_path: Path) -> None:
    rec = train()
    write_tensorboard(rec.data, tmp_path)
    events = read(tmp_path)
    tags = events.Tags()["histograms"]
    assert len(tags) == 12 and all(tag.startswith("outputs, log2 of magnitudes, %/") for tag in tags)
    tag = next(tag for tag in tags if tag[-1].isdecimal())
    histogram = events.Histograms(tag)[0].histogram_value
    assert sum(histogram.bucket) == pytest.approx(100) == pytest.approx(histogram.num)
    largest = rec.history(path=tag.rpartition("/")[2], stat="abs_max").values[0, 0]
    assert histogram.bucket_limit[-1] - 1 <= math.log2(largest) <= histogram.bucket_limit[-1]


def test_same_run_is_replaced_and_another_one_is_kept(tmp_path: Path) -> None:
    first = write_tensorboard(train().data, tmp_path)
    (tmp_path / "events.out.tfevents.1.other").write_bytes(b"")
    rec = train()
    path = write_tensorboard(rec.data, tmp_path)
    write_tensorboard(rec.data, tmp_path)
    assert {first.name, path.name, "events.out.tfevents.1.other"} == {
        each.name for each in tmp_path.iterdir()
    }


def test_missing_library_is_named_with_its_remedy(
    command: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with modtrace.record(nn.Linear(2, 2), "run.modtrace") as rec:
        nn.Linear(2, 2)(torch.ones(1, 2))
    assert rec.meta.complete
    monkeypatch.setitem(sys.modules, "tensorboard.compat.proto.event_pb2", None)
    told = command("export", "run.modtrace", "-o", "logs", "--format", "tensorboard", code=2).err
    assert "export to TensorBoard needs tensorboard" in told and "modtrace[tensorboard]" in told
    assert not (tmp_path / "logs").exists()
