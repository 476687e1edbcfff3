"""`modtrace record` of a program that compiles its model."""

import sys
from pathlib import Path

import pytest

import modtrace
from helpers.command_line import Command

PROGRAM = """
import torch
from torch import nn

model = nn.Sequential(nn.Linear(4, 4), nn.ReLU())
compiled = torch.compile(model, backend="eager")
for _ in range(2):
    compiled(torch.ones(2, 4)).sum().backward()
"""


@pytest.mark.parametrize(
    ("options", "paths", "told"),
    [
        ((), {""}, True),
        (("--compiled", "inside"), {"", "0", "1"}, False),
        (("--values", "none"), set(), False),
        (("--ops",), {""}, False),
        (("--keep-last", "1"), {""}, False),
    ],
)
def test_closing_line_says_how_to_see_inside(
    command: Command,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    options: tuple[str, ...],
    paths: set[str],
    told: bool,
) -> None:
    (tmp_path / "train.py").write_text(PROGRAM)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setitem(sys.modules, "__main__", sys.modules["__main__"])
    said = command("record", *options, "--to", "run", "train.py").err
    line = "torch.compile hides modules from it: --compiled inside measures them too"
    assert (line in said) is told
    assert "no module was called" not in said
    rec = modtrace.open_recording(tmp_path / "run")
    sites = rec.table("sites").to_pylist()
    names = {row["module_id"]: row["path"] for row in rec.table("modules").to_pylist()}
    assert {names[row["module_id"]] for row in sites if row["role"] == "output"} == paths


def test_measuring_inside_without_values_is_refused_in_the_words_of_the_command(
    command: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "train.py").write_text(PROGRAM)
    monkeypatch.chdir(tmp_path)
    assert (
        "--compiled: compiled='inside' measures values, and no values are wanted"
        in command("record", "--compiled", "inside", "--values", "none", "train.py", code=2).err
    )


@pytest.mark.parametrize(("factor", "told"), [("1", False), ("float('nan')", True)])
def test_closing_line_of_a_program_that_failed_tells_it_where_values_are_bad(
    command: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, factor: str, told: bool
) -> None:
    program = PROGRAM.replace("torch.ones(2, 4)", f"torch.ones(2, 4) * {factor}")
    (tmp_path / "train.py").write_text(f"{program}\nraise ValueError\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setitem(sys.modules, "__main__", sys.modules["__main__"])
    assert (
        "--compiled inside measures them too" in command("record", "--to", "run", "train.py", code=1).err
    ) is told


FUNCTION = """
import torch
from torch import nn

model = nn.Sequential(nn.Linear(4, 4), nn.ReLU())
optimizer = torch.optim.SGD(model.parameters())


@torch.compile(backend="eager")
def compute(x):
    return model(x).sum()


for _ in range(2):
    compute(torch.ones(2, 4)).backward()
    STEP
"""


@pytest.mark.parametrize(
    ("options", "step"),
    [((), "optimizer.step()"), ((), "pass"), (("--compiled", "inside"), "pass"), (("--ops",), "pass")],
)
def test_closing_line_says_that_a_compiled_function_hides_the_model(
    command: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, options: tuple[str, ...], step: str
) -> None:
    (tmp_path / "train.py").write_text(FUNCTION.replace("STEP", step))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setitem(sys.modules, "__main__", sys.modules["__main__"])
    assert command("record", *options, "--to", "run", "train.py").err.endswith(
        "modtrace: no module was called outside of compiled functions: "
        "to see those inside, compile the model instead\n"
    )
