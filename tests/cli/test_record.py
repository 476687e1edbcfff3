"""`modtrace record`: a script runs as `python` would run it, and is recorded."""

import os
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
from torch import nn

import modtrace
from helpers.command_line import run_command

TRAIN = """
import sys
import torch
from torch import nn

model = nn.Sequential(nn.Linear(4, 4), nn.ReLU())
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(5):
    optimizer.zero_grad()
    model(torch.ones(2, 4)).sum().backward()
    optimizer.step()
"""


def run(folder: Path, *arguments: str, script: str | None = None, check: int | None = 0):
    """Runs `modtrace` in a folder, with the script written there as train.py."""
    if script is not None:
        (folder / "train.py").write_text(textwrap.dedent(script))
    command = [sys.executable, "-c", "from modtrace.cli.main import main; main()", *arguments]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=120)
    if check is not None:
        assert done.returncode == check, done.stderr
    return done


def test_a_script_is_recorded_without_a_change_and_its_output_is_its_own(tmp_path):
    done = run(tmp_path, "record", "train.py", script=TRAIN + "print('trained')\n")
    assert done.stdout == "trained\n"
    assert done.stderr.startswith("modtrace: recorded 5 steps, ")
    assert done.stderr.endswith("Look at it with: modtrace show train.modtrace\n")
    rec = modtrace.open_recording(tmp_path / "train.modtrace")
    assert rec.table("steps").column("step").to_pylist() == [0, 1, 2, 3, 4]
    assert {row["type"] for row in rec.table("modules").to_pylist()} == {"Sequential", "Linear", "ReLU"}
    assert rec.meta.complete


def test_a_second_run_goes_beside_the_first_unless_it_is_to_take_its_place(tmp_path):
    run(tmp_path, "record", "-q", "train.py", script=TRAIN)
    done = run(tmp_path, "record", "train.py")
    assert "modtrace show train-2.modtrace" in done.stderr
    done = run(tmp_path, "record", "--overwrite", "train.py", script=TRAIN.replace("range(5)", "range(2)"))
    assert done.stderr.endswith("Look at it with: modtrace show train.modtrace\n")
    assert modtrace.open_recording(tmp_path / "train.modtrace").table("steps").num_rows == 2
    assert not (tmp_path / "train-3.modtrace").exists()


def test_the_script_finds_its_arguments_its_folder_and_itself_as_main(tmp_path):
    script = """
    import os, pickle, sys
    import helper
    class Mine: pass
    assert type(pickle.loads(pickle.dumps(Mine()))) is Mine
    print(__name__, sys.argv, os.getcwd() == os.path.realpath({here!r}), __file__, helper.there)
    print(sys.path[0] == os.path.realpath({there!r}), __spec__, sys.modules['__main__'].Mine is Mine)
    """
    inside = tmp_path / "inside"
    inside.mkdir()
    (inside / "helper.py").write_text("there = 'helped'\n")
    text = textwrap.dedent(script.format(here=str(tmp_path), there=str(inside)))
    (inside / "main.py").write_text(text)
    recorded = run(tmp_path, "record", "-q", "--to", "run", "inside/main.py", "--steps", "7", "-q", "x y")
    plain = subprocess.run(
        [sys.executable, "inside/main.py", "--steps", "7", "-q", "x y"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
    )
    assert recorded.stdout == plain.stdout
    assert "__main__ ['inside/main.py', '--steps', '7', '-q', 'x y'] True " in recorded.stdout


@pytest.mark.parametrize(("code", "expected"), [("7", 7), ("None", 0), ("'no luck'", 1), ("0", 0)])
def test_the_scripts_exit_code_is_passed_on(tmp_path, code, expected):
    done = run(tmp_path, "record", "-q", "train.py", script=f"import sys\nsys.exit({code})\n", check=expected)
    assert done.stderr == ("no luck\n" if code == "'no luck'" else "")


def test_a_traceback_is_that_of_the_script_alone(tmp_path):
    script = TRAIN + "def fail():\n    raise ValueError('boom')\n\nfail()\n"
    done = run(tmp_path, "record", "-q", "train.py", script=script, check=1)
    plain = subprocess.run([sys.executable, "train.py"], cwd=tmp_path, capture_output=True, text=True)
    assert done.stderr == plain.stderr
    rec = modtrace.open_recording(tmp_path / "train.modtrace")
    assert rec.meta.marks == ("the run ended by ValueError: boom; step 3 was the last to end",)
    assert rec.table("steps").num_rows == 5
    shown = run(tmp_path, "show", "train.modtrace")
    assert "! the run ended by ValueError: boom; step 3 was the last to end" in shown.stdout


def test_an_op_that_raises_is_marked_and_its_traceback_has_no_frame_of_ours(tmp_path):
    script = TRAIN + "model(torch.ones(2, 5))\n"
    done = run(tmp_path, "record", "-q", "--ops", "train.py", script=script, check=1)
    plain = subprocess.run([sys.executable, "train.py"], cwd=tmp_path, capture_output=True, text=True)
    assert done.stderr.splitlines()[-4:] == plain.stderr.splitlines()[-4:]
    assert "modtrace" not in done.stderr
    rows = modtrace.open_recording(tmp_path / "train.modtrace").table("ops").to_pylist()
    assert [row["name"] for row in rows if row["raised"]] == ["aten.addmm.default"]
    last = run(tmp_path, "paths", "train.modtrace", "--step", "5").stdout.splitlines()[-1]
    assert last.split() == ["aten.addmm.default", "0", "Linear", "forward", "raised"]


def test_a_script_that_is_no_python_says_so_as_python_does(tmp_path):
    done = run(tmp_path, "record", "-q", "train.py", script="def broken(:\n", check=1)
    assert f'File "{tmp_path}/train.py", line 1' in done.stderr
    assert "SyntaxError" in done.stderr
    assert "modtrace" not in done.stderr


def test_an_interrupt_ends_the_process_as_it_would_have_and_leaves_a_recording(tmp_path):
    script = TRAIN + "import os, signal\nos.kill(os.getpid(), signal.SIGINT)\nimport time\ntime.sleep(9)\n"
    done = run(tmp_path, "record", "-q", "train.py", script=script, check=-signal.SIGINT)
    assert done.stderr.rstrip().endswith("KeyboardInterrupt")
    rec = modtrace.open_recording(tmp_path / "train.modtrace")
    assert rec.meta.marks == ("the run ended by KeyboardInterrupt; step 3 was the last to end",)
    assert "step 4 (train)" in run(tmp_path, "show", "train.modtrace").stdout


def test_a_module_runs_as_python_m_runs_it(tmp_path):
    package = tmp_path / "pack"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "sub.py").write_text("value = 3\n")
    (package / "train.py").write_text(
        "import sys\nfrom . import sub\nfrom torch import nn\nimport torch\nnn.Linear(2, 2)(torch.ones(1, 2))\n"
        "print(__name__, __package__, sys.argv[1:], sub.value, __spec__.name)\n"
    )
    done = run(tmp_path, "record", "--steps", "0:5", "-m", "pack.train", "--to", "x", "-m")
    assert done.stdout == "__main__ pack ['--to', 'x', '-m'] 3 pack.train\n"
    assert modtrace.open_recording(tmp_path / "train.modtrace").table("calls").num_rows == 1
    (package / "__main__.py").write_text("print('the package itself')\n")
    assert run(tmp_path, "record", "-q", "-m", "pack").stdout == "the package itself\n"


def test_options_reach_the_recording(tmp_path):
    options = [
        "--steps",
        "1:4:2",
        "--backward-times",
        "--device-times",
        "--include",
        "re:^0$",
        "--exclude",
        "1",
    ]
    done = run(tmp_path, "record", "--to", "run", *options, "train.py", script=TRAIN)
    assert "no device times: nothing ran on a CUDA device" in done.stderr
    rec = modtrace.open_recording(tmp_path / "run")
    assert rec.table("steps").column("step").to_pylist() == [1, 3]
    assert "backward" in set(rec.table("calls").column("phase").to_pylist())
    assert rec.meta.options == {
        "steps": "1:4:2",
        "backward_times": True,
        "device_times": True,
        "ops": None,
        "values": "stats",
        "include": ["re:^0$"],
        "exclude": ["1"],
    }
    assert rec.meta.argv == ("train.py",)


def test_a_script_without_a_model_leaves_an_empty_recording_that_says_so(tmp_path):
    run(tmp_path, "record", "train.py", script="print('hello')\n")
    shown = run(tmp_path, "show", "train.modtrace", check=2)
    assert "no calls are in this recording: no module was called in its steps" in shown.stderr


def test_a_script_that_records_by_itself_is_recorded_twice(tmp_path):
    script = "import modtrace\n" + TRAIN.replace(
        "for step", "with modtrace.record(to='inner') as rec:\n  for step"
    ).replace("\n    ", "\n      ")
    run(tmp_path, "record", "--to", "outer", "train.py", script=script)
    tables = [modtrace.open_recording(tmp_path / each).table("calls") for each in ("outer", "inner")]
    assert tables[0].num_rows == tables[1].num_rows == 5 * 3 + 5


def test_python_without_recording_is_not_slower_for_a_killed_reader(tmp_path):
    """A pipe that nobody reads ends `show` in silence."""
    run(tmp_path, "record", "-q", "train.py", script=TRAIN)
    command = (
        f"{sys.executable} -c 'from modtrace.cli.main import main; main()' show train.modtrace | head -1"
    )
    done = subprocess.run(command, shell=True, cwd=tmp_path, capture_output=True, text=True)
    assert done.stdout.count("\n") == 1
    assert done.stderr == ""


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["record", "nope.py"], "nope.py: there is no such script (looked from {cwd})"),
        (["record", "."], ".: this is a folder without a __main__.py; give the script to run"),
        (
            ["record", "recorded"],
            "recorded: this is a recording: look at it with modtrace show; record takes",
        ),
        (["record", "-m", "no.such"], "-m no.such: no module of this name can be run from {cwd}"),
        (["record", "-m", "json.tool.sub"], "-m json.tool.sub: no module of this name can be run from {cwd}"),
        (["record", "-m", "broken.sub"], "-m broken.sub: importing it raised SyntaxError: "),
        (
            ["record", "-m", "raising.sub"],
            "-m raising.sub: importing it raised ImportError: gone (raising/__init__.py:2)",
        ),
        (["record"], "give a script to run, or -m and a module."),
        (
            ["record", "--steps", "3", "train.py"],
            "--steps: steps='3' is not START:STOP[:EVERY], such as 100:200 or 0::50",
        ),
        (["record", "--steps", "5:5", "train.py"], "--steps: steps='5:5' holds no step: START counts from 0"),
        (
            ["record", "--to", "there", "train.py"],
            "there: a folder that is not a recording is here already (it holds 'notes.txt')",
        ),
        (["show", "nope"], "nope: nothing is there. Give the folder of a recording."),
        (["show", "there"], "there: not a recording: there is no recording.json in this folder"),
        (
            ["show", "train.py"],
            "train.py: this is a script, and a recording is a folder. modtrace record train.py",
        ),
    ],
)
def test_misuse_ends_with_code_2_and_says_what_and_where(tmp_path, monkeypatch, capsys, arguments, text):
    (tmp_path / "train.py").write_text("raise AssertionError('never run')\n")
    for name, content in (("broken", "def f(:"), ("raising", "\nraise ImportError('gone')")):
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").write_text(content)
    (tmp_path / "there").mkdir()
    (tmp_path / "there" / "notes.txt").write_text("mine")
    with modtrace.record(nn.Linear(1, 1), tmp_path / "recorded"):
        pass
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setitem(sys.modules, "__main__", sys.modules["__main__"])  # a program takes its place
    assert run_command(monkeypatch, *arguments) == 2
    error = capsys.readouterr().err
    assert error.startswith("modtrace: error: ")
    assert text.format(cwd=os.getcwd()) in error
    assert (tmp_path / "there" / "notes.txt").read_text() == "mine"


def test_pattern_that_matches_nothing_is_told_in_a_line_and_marked(tmp_path):
    done = run(tmp_path, "record", "--to", "run", "--include", "O", "train.py", script=TRAIN)
    warning = next(line for line in done.stderr.splitlines() if "warning" in line)
    assert warning.startswith("modtrace: warning: include='O' matches no module or parameter that was met; ")
    assert modtrace.open_recording(tmp_path / "run").meta.marks == (
        warning.removeprefix("modtrace: warning: "),
    )
    assert done.stderr.count("include='O'") == 1


def test_pattern_of_parameters_matches_though_the_model_is_gone_at_the_end(tmp_path):
    script = f"def main():\n{textwrap.indent(TRAIN, '    ')}\nmain()\n"
    done = run(tmp_path, "record", "--to", "run", "--exclude", "**.bias", "train.py", script=script)
    assert "warning" not in done.stderr
    assert modtrace.open_recording(tmp_path / "run").meta.marks == ()


def test_source_lines_of_ops_are_recorded_and_the_end_points_to_who_made_a_nan(tmp_path):
    script = "import torch\nmodel = torch.nn.ReLU()\nmodel(torch.zeros(2)).log().sum()\n"
    done = run(
        tmp_path,
        "record",
        "--ops",
        "--source",
        "train.py",
        script=script + "model(torch.ones(1) * torch.nan)\n",
    )
    assert done.stderr.endswith(
        "modtrace: it holds NaN or infinite values. Do they matter? modtrace nonfinite train.modtrace\n"
    )
    rec = modtrace.open_recording(tmp_path / "train.modtrace")
    lines = {op["name"]: op["source"] for op in rec.table("ops").to_pylist()}
    assert lines["aten.log.default"] == f"{tmp_path}/train.py:3"
    done = run(tmp_path, "record", "--source", "train.py", check=2)
    assert "--source is about the ops that --ops records: give both." in done.stderr
