"""`modtrace show`."""

import json
import sys
from types import SimpleNamespace

import pytest

from builders import RecordingBuilder, TypedRecording
from helpers.command_line import run_command
from modtrace.errors import RecordingNotFoundError


@pytest.fixture
def recordings(monkeypatch: pytest.MonkeyPatch) -> dict[str, TypedRecording]:
    """The recordings that can be opened, by path."""
    found: dict[str, TypedRecording] = {}

    def open_recording(path: str) -> SimpleNamespace:
        if path not in found:
            raise RecordingNotFoundError(f"{path}: nothing is there")
        return SimpleNamespace(data=found[path])

    monkeypatch.setitem(sys.modules, "modtrace.api.recording", SimpleNamespace(open_recording=open_recording))
    return found


def two_steps() -> TypedRecording:
    build = RecordingBuilder(argv=("train.py",))
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


def test_shows_the_tree_of_the_last_step(
    recordings: dict[str, TypedRecording],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    recordings["run.modtrace"] = two_steps()

    assert run_command(monkeypatch, "show", "run.modtrace") == 0
    assert capsys.readouterr().out == (
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
        "backward times: record with --backward-times (backward_times=True)\n"
    )


def test_options_reach_the_view(
    recordings: dict[str, TypedRecording],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    recordings["run.modtrace"] = two_steps()

    arguments = ("--step", "0", "--depth", "1", "--sort", "name", "--no-fold", "--no-types")
    assert run_command(monkeypatch, "show", "run.modtrace", *arguments) == 0
    assert capsys.readouterr().out == (
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
        "backward times: record with --backward-times (backward_times=True)\n"
    )


def test_slots_have_lines_of_their_own_when_asked_for(
    recordings: dict[str, TypedRecording],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    build = RecordingBuilder()
    build.step(0, 0, 1_000)
    build.output(build.call(build.module("", "Net"), 0, 500), [1.0], "['logits']")
    recordings["run.modtrace"] = build.data()

    assert run_command(monkeypatch, "show", "run.modtrace", "--no-types") == 0
    assert "['logits']" not in capsys.readouterr().out
    assert run_command(monkeypatch, "show", "run.modtrace", "--no-types", "--slots") == 0
    assert capsys.readouterr().out.splitlines()[2:5] == [
        "module         type  calls  forward   self      %  out rms  out max",
        "Net            Net       1    500ns  500ns  50.0%     1.00     1.00",
        "   ['logits']                                         1.00     1.00",
    ]


def test_json_is_the_whole_tree(
    recordings: dict[str, TypedRecording],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    recordings["run.modtrace"] = two_steps()

    assert run_command(monkeypatch, "show", "run.modtrace", "--json", "--step", "1") == 0
    found = json.loads(capsys.readouterr().out)
    assert found["step"]["step"] == 1
    assert [child["path"] for child in found["roots"][0]["children"]] == ["0", "1"]
    assert found["roots"][0]["forward"]["total_ns"] == 5000


def test_step_that_does_not_exist_is_misuse_and_names_those_there_are(
    recordings: dict[str, TypedRecording],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    recordings["run.modtrace"] = two_steps()

    assert run_command(monkeypatch, "show", "run.modtrace", "--step", "7") == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err == (
        "modtrace: error: Invalid value for --step: no step 7 in this recording; there are: 0..1."
        " Try 'modtrace show --help'.\n"
    )


def test_recording_that_is_not_there_is_misuse(
    recordings: dict[str, TypedRecording],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert run_command(monkeypatch, "show", "nowhere") == 2
    assert capsys.readouterr().err == "modtrace: error: nowhere: nothing is there\n"


def test_empty_recording_is_exit_code_2_and_says_so(
    recordings: dict[str, TypedRecording],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    recordings["run.modtrace"] = RecordingBuilder(complete=True).data()

    assert run_command(monkeypatch, "show", "run.modtrace") == 2
    assert capsys.readouterr().err == (
        "modtrace: error: run.modtrace: no calls are in this recording: no module was called in its steps.\n"
    )
