"""Each command of modtrace that a page of docs shows runs as it stands, in the folder of a user with a script."""

import re
import runpy
import shlex
import shutil
import sys
from pathlib import Path

import pytest

import modtrace
from helpers.command_line import run_command

ROOT = Path(__file__).parents[2]

#: A command in a block of code, with or without a prompt.
COMMAND = re.compile(r"^(?:\$ )?(modtrace (?!nor |watches ).*)", re.MULTILINE)

#: What needs several ranks, a bucket or a run of a certain name, or ends by Ctrl-C. Tests of collectives, queries and
#: `view --follow` run such lines.
ELSEWHERE = ("--nproc", "--rank", "s3://", "--run ", "--follow")

PAGES = [page for page in sorted((ROOT / "docs").glob("*.md")) if COMMAND.search(page.read_text("utf-8"))]

#: Commands that end with 1 if they have found something.
ANSWERS = ("nonfinite", "check", "compare", "verify", "recompute", "ranks")

#: The example's script with a small model, for the user's own one.
TRAIN = f"""
import runpy, sys
sys.argv[1:1] = "--steps 30 --width 16 --layers 2 --heads 2 --context 8 --batch 1".split()
runpy.run_path({str(ROOT / "examples" / "train_gpt.py")!r}, run_name="__main__")
"""

MODEL = """
import torch
def make_gpt():
    return torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 2)), (torch.ones(3, 4),), {}
"""


@pytest.fixture(scope="module")
def recorded(tmp_path_factory) -> Path:
    """A recording of the user's script with ops and values."""
    folder = tmp_path_factory.mktemp("recorded")
    (folder / "train.py").write_text(TRAIN)
    kept = sys.argv
    sys.argv = ["train.py", "--steps", "4"]
    try:
        with modtrace.record(to=folder / "run.modtrace", ops=True, values=modtrace.Capture(stats=2)):
            runpy.run_path(str(folder / "train.py"), run_name="__main__")
    finally:
        sys.argv = kept
    return folder / "run.modtrace"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_each_command_of_a_page_runs(page: Path, recorded: Path, tmp_path: Path, monkeypatch, capsys) -> None:
    (tmp_path / "train.py").write_text(TRAIN)
    (tmp_path / "models").mkdir()
    (tmp_path / "models" / "gpt.py").write_text(MODEL)
    for name in ("run", "one", "train", "before", "after"):
        shutil.copytree(recorded, tmp_path / f"{name}.modtrace")
    monkeypatch.chdir(tmp_path)
    for line in COMMAND.findall(page.read_text("utf-8")):
        _, command, *arguments = shlex.split(line, comments=True)
        if any(part in line for part in ELSEWHERE):
            continue
        if command == "record":
            for made in ("train.modtrace", *(part for part in arguments if part.endswith(".modtrace"))):
                shutil.rmtree(made, ignore_errors=True)
        code = run_command(monkeypatch, command, *arguments)
        printed = capsys.readouterr()
        assert code in (0, *([1] if command in ANSWERS else [])), (line, printed.err)
