"""`modtrace show`."""

import json
from pathlib import Path

import pytest
import torch
from torch import nn

import modtrace
from builders import RecordingBuilder, TypedRecording
from helpers.command_line import Command
from modtrace.store.copy import write_recording


class Recordings:
    """The recordings in the current folder, by path."""

    def __setitem__(self, path: str, data: TypedRecording) -> None:
        write_recording(data, path)


@pytest.fixture
def recordings(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Recordings:
    monkeypatch.chdir(tmp_path)
    return Recordings()


def two_steps() -> TypedRecording:
    build = RecordingBuilder(complete=True, argv=("train.py",))
    net = build.module("", "Net", parameters=1_200_000)
    blocks = [build.module(str(index), "Block", parent=net) for index in range(2)]
    inside = [build.module(f"{index}.fc", "Linear", parent=block) for index, block in enumerate(blocks)]
    for step in range(2):
        start_ns = step * 10_000
        build.step(step, start_ns, start_ns + 8_000)
        outer = build.call(net, start_ns, start_ns + 4_000 + 1_000 * step)
        for block, linear in zip(blocks, inside, strict=True):
            call = build.call(block, start_ns, start_ns + 1_000, parent=outer)
            build.call(linear, start_ns, start_ns + 500, parent=call)
    return build.data()


def test_shows_the_tree_of_the_last_step(command: Command, recordings: Recordings) -> None:
    recordings["run.modtrace"] = two_steps()

    first, tree = command("show", "run.modtrace").out.split("\n", 1)
    assert first.startswith("nothing found; not checked: nonfinite, unused-experts, no-gradient and ")
    assert first.endswith(" more (modtrace check run.modtrace)")
    assert tree == (
        "train.py\n"
        "step 1 (train), 8.00us; 2 steps recorded, 0 to 1\n"
        "\n"
        "module                  type    calls  forward    self      %  params\n"
        "Net                     Net         1   5.00us  3.00us  62.5%   1.20M\n"
        "├─ 0                    Block       1   1.00us   500ns  12.5%\n"
        "├─ 1                    Block       1   1.00us   500ns  12.5%\n"
        "└─ inside 0..1, summed\n"
        "   └─ fc x2             Linear      2   1.00us  1.00us  12.5%\n"
        "\n"
        "type    modules  calls  forward    self      %\n"
        "Net           1      1   5.00us  3.00us  62.5%\n"
        "Block         2      2   2.00us  1.00us  25.0%\n"
        "Linear        2      2   1.00us  1.00us  12.5%\n"
        "\n"
        "outside of modules  3.00us   37.5%\n"
        "self: without the modules inside; %: of the time of the step\n"
        "backward counts as outside: record with --backward-times (backward_times=True)\n"
    )


def test_medians_of_requested_steps_are_shown(command: Command, recordings: Recordings) -> None:
    recordings["run.modtrace"] = two_steps()
    assert (
        "median of 2 steps, 0 to 1 (train), 8.00us;" in command("show", "run.modtrace", "--steps", "0:2").out
    )
    refused = command("show", "run.modtrace", "--steps", "5:", code=2).err
    assert "steps='5:' holds no step of this recording that has ended; there are: 0..1" in refused
    both = command("show", "run.modtrace", "--steps", "0:", "--step", "1", code=2).err
    assert "steps='0:': a single step is requested too, step=1; give one of them" in both


def test_options_reach_the_view(command: Command, recordings: Recordings) -> None:
    recordings["run.modtrace"] = two_steps()

    arguments = ("--step", "0", "--depth", "1", "--sort", "name", "--no-fold", "--no-types")
    assert command("show", "run.modtrace", *arguments).out.split("\n", 1)[1] == (
        "train.py\n"
        "step 0 (train), 8.00us; 2 steps recorded, 0 to 1\n"
        "\n"
        "module  type   calls  forward    self      %  params\n"
        "Net     Net        1   4.00us  2.00us  50.0%   1.20M\n"
        "├─ 0    Block      1   1.00us   500ns  12.5%\n"
        "└─ 1    Block      1   1.00us   500ns  12.5%\n"
        "\n"
        "outside of modules  4.00us   50.0%\n"
        "self: without the modules inside; %: of the time of the step\n"
        "backward counts as outside: record with --backward-times (backward_times=True)\n"
    )


def test_slots_have_lines_of_their_own_when_asked_for(command: Command, recordings: Recordings) -> None:
    build = RecordingBuilder(complete=True)
    build.step(0, 0, 1_000)
    build.output(build.call(build.module("", "Net"), 0, 500), [1.0], "['logits']")
    recordings["run.modtrace"] = build.data()

    assert "['logits']" not in command("show", "run.modtrace", "--no-types").out
    assert command("show", "run.modtrace", "--no-types", "--slots").out.splitlines()[3:6] == [
        "module         type  calls  forward   self      %  out rms  out max",
        "Net            Net       1    500ns  500ns  50.0%     1.00     1.00",
        "   ['logits']                                         1.00     1.00",
    ]


def test_json_is_the_whole_tree(command: Command, recordings: Recordings) -> None:
    recordings["run.modtrace"] = two_steps()

    found = json.loads(command("show", "run.modtrace", "--json", "--step", "1").out)
    assert found["step"]["step"] == 1
    assert [child["path"] for child in found["roots"][0]["children"]] == ["0", "1"]
    assert found["roots"][0]["forward"]["total_ns"] == 5000


def test_step_that_does_not_exist_is_misuse_and_names_those_there_are(
    command: Command, recordings: Recordings
) -> None:
    recordings["run.modtrace"] = two_steps()

    captured = command("show", "run.modtrace", "--step", "7", code=2)
    assert captured.out == ""
    assert captured.err == (
        "modtrace: error: Invalid value for --step: no step 7 in this recording; there are: 0..1."
        " Try 'modtrace show --help'.\n"
    )


def test_models_that_other_steps_call_are_named_with_a_step_that_shows_them(
    command: Command, recordings: Recordings
) -> None:
    encoder, probe = nn.Sequential(nn.Linear(4, 4), nn.ReLU()), nn.Linear(4, 2)
    with modtrace.record(strict=True) as rec:
        for model, steps in ((encoder, 5), (probe, 8)):
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            for _ in range(steps):
                optimizer.zero_grad()
                model(torch.randn(2, 4)).sum().backward()
                optimizer.step()
    recordings["run.modtrace"] = rec.data
    assert (
        "other steps call Sequential: modtrace show run.modtrace --step 4"
        in command("show", "run.modtrace").out
    )
    alone = command("show", "run.modtrace", "--step", "4").out
    assert "other steps call" not in alone
    assert "ReLU" in alone
    assert str(rec.module_tree()).count("other steps call Sequential: module_tree(step=4)") == 1


def test_steps_between_that_call_other_modules_are_named() -> None:
    """A discriminator and a generator that take turns: each kind of step has its own tree."""
    generator, discriminator = nn.Linear(2, 4), nn.Linear(4, 1)
    optimizers = [torch.optim.SGD(model.parameters(), 0.1) for model in (generator, discriminator)]
    with modtrace.record([generator, discriminator], values=None) as rec:
        for turn in range(12):
            optimizer = optimizers[turn % 2]
            for _ in range(1 + turn % 2):
                discriminator(generator(torch.ones(3, 2))).sum().backward()
            optimizer.step()
    tree = rec.module_tree()
    steps, unlike = tree.step.sample.steps, tree.unlike
    assert (steps, unlike) == ((3, 5, 7, 9, 11), (4, 6, 8, 10))
    assert "4 training steps between them call models or optimizers otherwise: module_tree(step=10)" in str(
        tree
    )
    assert "otherwise" not in str(rec.module_tree(step=10))


def test_values_are_those_of_the_first_bad_step_and_times_are_medians(
    command: Command, recordings: Recordings
) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with modtrace.record(model, "run.modtrace") as rec:
        for step in range(9):
            loss = model(torch.ones(3, 4)).sum()
            (loss * torch.nan if step == 4 else loss).backward()
            optimizer.step()
            optimizer.zero_grad()
            rec.step()
    shown = command("show", "run.modtrace", "--no-types").out
    assert "median of 7 steps, 2 to 8 (train)" in shown
    marks = {line.split()[1]: line for line in shown.splitlines() if line.startswith(("├─", "└─"))}
    assert marks["1"].endswith("grad 12 NaN")
    assert marks["2"].endswith("grad, param grad")  # in step 4, and all else is NaN from step 5 on
    assert "NaN, inf, out, grad, grad/param: of step 4, the first bad one" in shown
    assert "out, param" in command("show", "run.modtrace", "--no-types", "--step", "8").out
    tree = modtrace.open_recording("run.modtrace").module_tree()
    assert tree.values_step == 4 and "of step 4, the first bad one" in str(tree)
