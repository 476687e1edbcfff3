"""Every command that reads a recording: where nothing could be looked at, it exits with 2 and says why."""

import json
from pathlib import Path

import pytest

from builders import RecordingBuilder
from helpers.command_line import run_command
from modtrace.store.copy import write_recording

#: What each command is given behind the recording, and the table that it cannot do without.
ARGUMENTS = {
    "show": ("", "calls"),
    "ops": ("", "ops"),
    "memory": ("", "ops"),
    "paths": ("", "ops"),
    "graph": ("", "calls"),
    "graph -o": ("-o a.json", "calls"),
    "timeline": ("", "calls"),
    "timeline --ops": ("--ops", "ops"),
    "plot": ("-o a.png", "values"),
    "export": ("-o a.trace.json", "calls"),
    "export graph": ("-o a.json", "calls"),
    "nonfinite": ("", "values"),
}
EACH_COMMAND = pytest.mark.parametrize("command", ARGUMENTS)
#: What is wrong with the table is found in one place for all of them.
SOME_COMMANDS = pytest.mark.parametrize("command", ["show", "timeline", "timeline --ops"])


class Runner:
    """Runs commands on one recording and keeps what they have said."""

    def __init__(
        self, folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        self.path = folder / "run.modtrace"
        self._monkeypatch = monkeypatch
        self._capsys = capsys
        monkeypatch.chdir(folder)

    @property
    def tables(self) -> Path:
        return self.path / "rank-00000"

    def __call__(self, command: str, *more: str) -> int:
        arguments = ARGUMENTS[command][0].split()
        code = run_command(self._monkeypatch, command.split()[0], "run.modtrace", *arguments, *more)
        said = self._capsys.readouterr()
        self.out, self.err = said.out, said.err
        return code

    def kill(self) -> None:
        """Makes it the recording of a process that was killed."""
        file = self.tables / "meta.json"
        values = json.loads(file.read_text()) | {"ended": None, "complete": False}
        file.write_text(json.dumps(values))


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Runner:
    """A recording with two steps, each with a call, an op and a measured output."""
    build = RecordingBuilder(complete=True, options={"values": "stats", "ops": {"saved": True}})
    net = build.module("", "Net", parameters=12)
    for step in (0, 1):
        build.step(step, step * 1000, step * 1000 + 900)
        call = build.call(net, step * 1000, step * 1000 + 500)
        build.tensor([2], producer=build.op(call, "aten.relu.default", step * 1000 + 10, step * 1000 + 20))
        build.output(call, [1.0, 2.0])
    write_recording(build.data(), tmp_path / "run.modtrace")
    return Runner(tmp_path, monkeypatch, capsys)


def fill(run: Runner, *, wanted: bool) -> None:
    """Puts a recording of a call in its place that has nothing else."""
    options = {"values": "stats", "ops": {"saved": True}} if wanted else {"values": None, "ops": None}
    build = RecordingBuilder(complete=True, options=options)
    net = build.module("", "Net")
    build.step(0, 0, 100)
    build.call(net, 0, 50)
    write_recording(build.data(), run.path, overwrite=True)


@EACH_COMMAND
def test_whole_recording_is_exit_code_0(run: Runner, command: str) -> None:
    pytest.importorskip("matplotlib")
    assert run(command) == 0
    assert "missing" not in run.err


@EACH_COMMAND
def test_table_whose_file_is_gone_is_the_reason(run: Runner, command: str) -> None:
    table = ARGUMENTS[command][1]
    (run.tables / f"{table}.arrow").unlink()
    assert run(command) == 2
    assert (run.out, run.err) == (
        "",
        f"modtrace: error: run.modtrace: no {table} are in this recording. "
        f"The recording is not whole: {table}.arrow is missing.\n",
    )
    assert not list(run.path.parent.glob("a.*"))


@SOME_COMMANDS
def test_table_whose_file_is_cut_to_nothing_is_the_reason(run: Runner, command: str) -> None:
    table = ARGUMENTS[command][1]
    (run.tables / f"{table}.arrow").write_bytes(b"")
    assert run(command) == 2
    assert run.err == (
        f"modtrace: error: run.modtrace: no {table} are in this recording. "
        f"The recording is not whole: {table}.arrow is cut: all of its rows are missing.\n"
    )


@SOME_COMMANDS
def test_run_that_was_killed_before_anything_was_written_is_the_reason(run: Runner, command: str) -> None:
    for each in run.tables.glob("*.arrow"):
        each.unlink()
    run.kill()
    assert run(command) == 2
    table = "calls" if command.startswith("timeline") else ARGUMENTS[command][1]
    assert run.err == (
        f"modtrace: error: run.modtrace: no {table} are in this recording. The recording is not "
        "whole: not closed: the process ended or is still running; no step is complete.\n"
    )


@EACH_COMMAND
def test_json_has_the_reason_too(run: Runner, command: str) -> None:
    table = ARGUMENTS[command][1]
    (run.tables / f"{table}.arrow").unlink()
    assert run(command, "--json", *(["-o", "b.trace.json"] if command.startswith("timeline") else [])) == 2
    assert json.loads(run.out) == {
        "error": f"run.modtrace: no {table} are in this recording. "
        f"The recording is not whole: {table}.arrow is missing."
    }


NO_VALUES = (
    "no values were recorded. Record with values='stats' or modtrace.Capture(...) "
    "(modtrace record --values stats or --capture)."
)


@pytest.mark.parametrize(
    ("command", "advice"),
    [
        ("ops", "no ops were recorded. Record with ops=True (modtrace record --ops)."),
        ("memory", "no ops were recorded. Record with ops=True (modtrace record --ops)."),
        ("paths", "no ops were recorded. Record with ops=True (modtrace record --ops)."),
        ("timeline --ops", "no ops were recorded. Record with ops=True (modtrace record --ops)."),
        ("plot", NO_VALUES),
        ("nonfinite", NO_VALUES),
    ],
)
def test_recording_that_was_not_to_have_them_says_how_to_record_them(
    run: Runner, command: str, advice: str
) -> None:
    fill(run, wanted=False)
    assert run(command) == 2
    assert run.err == f"modtrace: error: run.modtrace: {advice}\n"


def test_nothing_that_was_wanted_has_run(run: Runner) -> None:
    fill(run, wanted=True)
    assert run("nonfinite") == 2
    assert run.err == (
        "modtrace: error: run.modtrace: no values are in this recording: "
        "no tensor came up that it was to measure.\n"
    )


@pytest.mark.parametrize("command", ["ops", "paths"])
def test_phase_in_which_nothing_ran_says_which_there_are(run: Runner, command: str) -> None:
    assert run(command, "--phase", "recompute") == 2
    assert run.err == (
        "modtrace: error: run.modtrace: no ops of step 1 ran in phase 'recompute'; they ran in: forward.\n"
    )


@pytest.mark.parametrize("command", ["graph", "graph -o", "export graph"])
def test_part_of_a_graph_with_nothing_in_it_says_what_there_is(run: Runner, command: str) -> None:
    assert run(command, "--phase", "recompute") == 2
    assert run.err == (
        "modtrace: error: run.modtrace: no op of the step is in the part that was chosen; ops ran in: forward.\n"
    )


@pytest.mark.parametrize("command", ["show", "ops", "memory", "paths", "graph", "timeline"])
def test_step_that_is_not_there_may_be_missing(run: Runner, command: str) -> None:
    (run.tables / "sites.arrow").unlink()
    assert run(command, "--step", "9") == 2
    assert (
        "no step 9 in this recording; there are: 0..1. The recording is not whole: sites.arrow is missing"
    ) in run.err


# What is found in a part of a recording.


def test_finite_values_of_a_recording_in_parts_say_where_they_end(run: Runner) -> None:
    run.kill()
    assert run("nonfinite") == 0
    assert run.out == (
        "no non-finite values in what is there of the recording: 2 measured tensors of 2 steps, the last of them "
        "step 1\n! not closed: the process ended or is still running; complete to step 1\n"
    )
    assert run("nonfinite", "--json") == 0
    assert json.loads(run.out) == {
        "first": None,
        "measured": {
            "tensors": 2,
            "unmeasured": 0,
            "steps": 2,
            "last_step": 1,
            "nonfinite": 0,
            "recorded_steps": 2,
            "chosen_steps": None,
            "held": None,
        },
        "marks": ["not closed: the process ended or is still running; complete to step 1"],
    }


@EACH_COMMAND
def test_every_answer_from_a_recording_in_parts_says_what_is_missing(run: Runner, command: str) -> None:
    pytest.importorskip("matplotlib")
    run.kill()
    mark = "not closed: the process ended or is still running; complete to step 1"
    assert run(command) == 0
    assert f"! {mark}\n" in run.out + run.err
    assert run(command, "--json", *(["-o", "b.trace.json"] if command.startswith("timeline") else [])) == 0
    assert mark in json.dumps(json.loads(run.out))


def test_paths_of_modules_alone_are_followed_by_what_is_missing(run: Runner) -> None:
    run.kill()
    assert run("paths", "--modules") == 0
    assert run.out == "Net\n"
    assert run.err == "! not closed: the process ended or is still running; complete to step 1\n"


def test_backward_times_that_are_missing_are_not_said_to_be_unwanted(run: Runner) -> None:
    assert run("show") == 0
    assert "--backward-times" not in run.out


def test_role_that_is_missing_says_that_the_recording_is_not_whole(run: Runner) -> None:
    run.kill()
    assert run("plot", "--role", "parameter") == 2
    assert run.err == (
        "modtrace: error: run.modtrace: role='parameter' was not measured; measured were: output. "
        "Record with values=modtrace.Capture(roles='parameter') (modtrace record --capture 'roles=parameter'). "
        "The recording is not whole: not closed: the process ended or is still running; complete to step 1.\n"
    )
