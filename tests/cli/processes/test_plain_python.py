"""A program that is recorded sees what plain Python would show it: its globals, its archive, its tracebacks."""

import subprocess
import sys
import zipapp
import zipfile
from pathlib import Path

import pytest

import modtrace
from helpers.command_ends import end_of_modtrace, end_of_program

SHOW = """
import sys
print(sorted(globals()))
print(__name__, __file__, repr(__package__), __spec__ and (__spec__.name, __spec__.origin), __cached__)
print(type(__loader__), type(__builtins__), __annotations__, sys.argv, sys.path[0])
import {helper}
{helper}.run()
"""
#: What plain Python shows needs no torch, which takes seconds to import.
HELPER = """
import sys
def run():
    if "modtrace" in sys.modules:
        import torch
        torch.nn.Linear(2, 2)(torch.ones(2))
    print("the helper", __file__)
"""

RAISE = """
import torch

class Wrong(torch.nn.Module):
    def forward(self, x):
        y = (x * 2).requires_grad_()
        y.register_hook(lambda gradient: 1 / 0)
        y.sum().backward()

def fail():
    try:
        Wrong()(torch.ones(2))
    except ZeroDivisionError as error:
        raise {raised} from error

fail()
"""

RUN_PLAINLY = "import os, runpy; runpy.run_path(os.path.abspath('script.py'), run_name='__main__')"

CAUGHT = """
import sys, traceback
import torch

class Fails(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x * 2

    @staticmethod
    def backward(ctx, gradient):
        return 1 / 0

class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = torch.nn.Linear(2, 2)

    def forward(self, x):
        return Fails.apply(self.inner(x)).sum()

    def other(self, x):
        return self.inner(x)

class Data(torch.utils.data.Dataset):
    def __len__(self):
        return 1

    def __getitem__(self, row):
        return [][row]

class Adam(torch.optim.Adam):
    def step(self, closure=None):
        raise ValueError("no step")

def scale():
    scaler, optimizer = torch.amp.GradScaler("cpu"), Adam(net.parameters())
    scaler.scale(net.inner(torch.ones(1, 2)).sum()).backward()
    scaler.step(optimizer)

net = Net()
groups = [lambda error: ExceptionGroup("many", [error])] if sys.version_info >= (3, 11) else []
for failing in (
    lambda: net(torch.ones(1, 2)).backward(),
    lambda: torch.autograd.grad(net(torch.ones(1, 2)), net.inner.weight),
    lambda: torch.utils.checkpoint.checkpoint(net, torch.ones(1, 2), use_reentrant=True).backward(),
    lambda: net(torch.ones(1, 3)),
    lambda: net.other(torch.ones(1, 3)),
    lambda: next(iter(torch.utils.data.DataLoader(Data()))),
    scale,
    lambda: torch.ones(3) @ torch.ones(4),
):
    try:
        failing()
    except Exception as error:
        traceback.print_exc()
        for around in (lambda error: RuntimeError("behind"), *groups):
            try:
                raise around(error) from error
            except Exception:
                traceback.print_exc()
"""


def run_plainly(folder: Path, *arguments: str) -> tuple[str, str]:
    """Returns what a command of Python prints, and what it says on standard error."""
    done = subprocess.run([sys.executable, *arguments], cwd=folder, capture_output=True, text=True)
    return done.stdout, done.stderr


def record(folder: Path, *arguments: str) -> tuple[str, str]:
    """Returns the same of `modtrace record`."""
    done = end_of_modtrace(folder, "record", *arguments)
    return done.stdout, done.stderr


@pytest.fixture
def programs(tmp_path: Path) -> Path:
    (tmp_path / "script.py").write_text(SHOW.format(helper="helper"))
    (tmp_path / "helper.py").write_text(HELPER)
    folder = tmp_path / "app"
    folder.mkdir()
    (folder / "__main__.py").write_text(SHOW.format(helper="inner"))
    (folder / "inner.py").write_text(HELPER)
    zipapp.create_archive(folder, tmp_path / "app.pyz", interpreter="/usr/bin/env python3")
    package = tmp_path / "pack"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "__main__.py").write_text(SHOW.format(helper="helper"))
    return tmp_path


@pytest.mark.parametrize(
    "program",
    [["script.py"], ["./script.py"], ["app"], ["./app/"], ["app.pyz"], ["-m", "pack"], ["-m", "script"]],
    ids=" ".join,
)
def test_program_sees_the_globals_and_paths_that_python_gives_it(programs: Path, program: list[str]) -> None:
    plain, error = run_plainly(programs, *program, "one")
    assert "the helper" in plain, error
    assert record(programs, "-q", "-o", "run", *program, "one") == (plain, "")
    assert modtrace.open_recording(programs / "run").table("calls").num_rows == 1


def test_archive_without_a_main_is_refused(tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "none.zip", "w") as archive:
        archive.writestr("inner.py", "")
    _, error = record(tmp_path, "none.zip")
    assert "none.zip: this is an archive without a __main__.py; give the script to run" in error


@pytest.mark.parametrize(
    "raised",
    [
        "RuntimeError('behind')",
        pytest.param(
            "ExceptionGroup('many', [error, ValueError('other')])",
            marks=pytest.mark.skipif(sys.version_info < (3, 11), reason="groups exist since Python 3.11"),
        ),
    ],
    ids=["cause", "group"],
)
def test_no_frame_of_ours_shows_below_an_uncaught_error(tmp_path: Path, raised: str) -> None:
    (tmp_path / "script.py").write_text(RAISE.format(raised=raised))
    plain = end_of_program(tmp_path, RUN_PLAINLY).stderr
    _, shown = record(tmp_path, "-q", "--ops", "-o", "run", "script.py")
    assert "ZeroDivisionError" in shown
    assert "modtrace/collect" not in shown

    def own_lines(text: str) -> list[str]:
        return [line for line in text.splitlines() if "script.py" in line]

    assert own_lines(shown) == own_lines(plain)


@pytest.mark.skipif(
    sys.version_info < (3, 11), reason="before, an error that is raised on gets an entry for the frame"
)
def test_tracebacks_that_a_program_prints_itself_are_those_of_plain_python(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(CAUGHT)
    plain = end_of_program(tmp_path, RUN_PLAINLY).stderr
    assert plain.count("Traceback (most recent call last)") > 30

    def places(text: str) -> list[str]:
        calls = "torch/nn/modules/module.py"  # which makes a call with hooks in two frames more
        return [line for line in text.splitlines() if line.strip().startswith("File") and calls not in line]

    for options in ([], ["--ops"], ["--ops", "--source"]):
        _, shown = record(tmp_path, "-q", "--overwrite", "-o", "run", *options, "script.py")
        assert "src/modtrace" not in shown
        assert places(shown) == places(plain), options
