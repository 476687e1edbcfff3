"""`modtrace record`: a script runs as `python` would run it, and is recorded."""

import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
from torch import nn

import modtrace
from helpers.command_ends import End, end_of_modtrace
from helpers.command_line import Command

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


def run(folder: Path, *arguments: str, script: str | None = None, status: int = 0, before: str = "") -> End:
    """Runs `modtrace` in a folder, with the script written there as train.py."""
    if script is not None:
        (folder / "train.py").write_text(textwrap.dedent(script))
    done = end_of_modtrace(folder, *arguments, before=before)
    assert done.status == status, done.stderr
    return done


def test_a_script_is_recorded_without_a_change_and_its_output_is_its_own(tmp_path):
    (tmp_path / "train.py").write_text(TRAIN + "print('trained')\n")
    command = [sys.executable, "-m", "modtrace", "record", "train.py"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0
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


def test_a_run_that_recorded_nothing_leaves_its_name_to_the_next(tmp_path):
    run(tmp_path, "record", "-q", "train.py", script="import no_such_library\n", status=1)
    assert (tmp_path / "train.modtrace").exists()
    done = run(tmp_path, "record", "train.py", script=TRAIN)
    assert done.stderr.endswith("Look at it with: modtrace show train.modtrace\n")
    run(tmp_path, "record", "-q", "train.py", script="import no_such_library\n", status=1)
    done = run(tmp_path, "record", "train.py", script=TRAIN)
    assert done.stderr.endswith("Look at it with: modtrace show train-2.modtrace\n")


def test_a_run_whose_name_another_has_taken_between_its_choice_and_its_start_takes_the_next(tmp_path):
    run(tmp_path, "record", "-q", "train.py", script=TRAIN)
    chosen_too_early = (
        "import modtrace.cli.record as command\n"
        "find, early = command._free_place, ['train.modtrace']\n"
        "command._free_place = lambda stem: early.pop() if early else find(stem)"
    )
    done = run(tmp_path, "record", "train.py", before=chosen_too_early)
    assert done.stderr.endswith("Look at it with: modtrace show train-2.modtrace\n")


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


def test_an_op_that_raises_is_marked_and_its_traceback_has_no_frame_of_ours(tmp_path):
    script = TRAIN + "model(torch.ones(2, 5))\n"
    done = run(tmp_path, "record", "-q", "--ops", "train.py", script=script, status=1)
    plain = run(tmp_path, status=1, before="import runpy; runpy.run_path('train.py', run_name='__main__')")
    assert done.stderr.splitlines()[-4:] == plain.stderr.splitlines()[-4:]
    assert "modtrace" not in done.stderr
    rows = modtrace.open_recording(tmp_path / "train.modtrace").table("ops").to_pylist()
    assert [row["name"] for row in rows if row["raised"]] == ["aten.addmm.default"]
    last = run(tmp_path, "paths", "train.modtrace", "--step", "5").stdout.splitlines()[-1]
    assert last.split() == ["aten.addmm.default", "0", "Linear", "forward", "raised"]


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
    shown = run(tmp_path, "show", "train.modtrace", status=2)
    assert "no calls are in this recording: no module was called in its steps" in shown.stderr


def test_a_script_that_records_by_itself_is_recorded_twice(tmp_path):
    script = "import modtrace\n" + TRAIN.replace(
        "for step", "with modtrace.record(to='inner') as rec:\n  for step"
    ).replace("\n    ", "\n      ")
    run(tmp_path, "record", "--to", "outer", "train.py", script=script)
    tables = [modtrace.open_recording(tmp_path / each).table("calls") for each in ("outer", "inner")]
    assert tables[0].num_rows == tables[1].num_rows == 5 * 3 + 5


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
            ["record", "--to", "there", "train.py"],
            "there: a folder that is not a recording is here already (it holds 'notes.txt')",
        ),
        (
            ["record", "--to", "recorded", "train.py"],
            "Give another path, or overwrite=True (--overwrite) to replace it.",
        ),
        (["show", "nope"], "nope: nothing is there. Give the folder of a recording."),
        (["show", "there"], "there: not a recording: there is no recording.json in this folder"),
        (
            ["show", "train.py"],
            "train.py: this is a script, and a recording is a folder. modtrace record train.py",
        ),
    ],
)
def test_misuse_ends_with_code_2_and_says_what_and_where(
    command: Command, tmp_path, monkeypatch, arguments, text
):
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
    error = command(*arguments, code=2).err
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
    done = run(tmp_path, "record", "--source", "train.py", status=2)
    assert "--source is about the ops that --ops records: give both." in done.stderr
