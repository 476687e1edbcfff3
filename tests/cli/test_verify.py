"""`modtrace verify`."""

import json
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from helpers.command_line import Command
from modtrace.collect.ops.schemas import OpSchema

SOURCE = """
import torch
from torch import nn

def make():
    return nn.Sequential(nn.Linear(4, 4), nn.ReLU(inplace=True)), (torch.ones(2, 4),)

def no_model():
    return 3

def fails():
    return nn.Linear(4, 4), (torch.ones(2, 5),)
"""


@pytest.fixture(autouse=True)
def models(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    (tmp_path / "models_to_verify.py").write_text(SOURCE)
    torch.manual_seed(0)
    yield
    sys.modules.pop("models_to_verify", None)


def test_proved_recording_is_shown_and_exits_with_0(command: Command) -> None:
    lines = command("verify", "models_to_verify:make").out.splitlines()
    assert lines[0] == "models_to_verify:make (Sequential): its recording is proved"
    assert [line[:8].strip() for line in lines[1:11]] == ["ok"] * 10


def test_fault_exits_with_1(command: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    from modtrace.collect.ops import mode as op_mode

    class Blind(OpSchema):
        def __init__(self, func: object, index: int) -> None:
            super().__init__(func, index)
            self.writes = False

    monkeypatch.setattr(op_mode, "OpSchema", Blind)
    out = command("verify", "models_to_verify:make", code=1).out
    assert out.startswith("models_to_verify:make (Sequential): FAILED: ")
    assert "(aten.relu_.default in 1, forward) has changed its self, recorded as only read" in out


def test_module_that_parses_arguments_where_it_is_imported_sees_none_of_the_command(
    command: Command, tmp_path: Path
) -> None:
    parsing = "import argparse\nseed = argparse.ArgumentParser().parse_args()\n"
    (tmp_path / "models_to_verify.py").write_text(parsing + SOURCE)
    command("verify", "models_to_verify:make", "--seed", "7")
    assert sys.argv[1] == "verify"


def test_json_is_given(command: Command) -> None:
    found = json.loads(command("verify", "models_to_verify:make", "--json", "--seed", "7").out)
    assert (found["ok"], found["unchecked"]) == (True, [])
    assert [each["name"] for each in found["checks"]][:2] == ["determinism", "op count"]


@pytest.mark.parametrize(
    ("factory", "expected"),
    [
        ("models_to_verify:no_model", "the factory returned an int; it must return (model, args, kwargs)"),
        ("models_to_verify:fails", "calling the model raised RuntimeError: "),
        ("models_to_verify", "'models_to_verify': give MODULE:FACTORY"),
    ],
)
def test_what_is_no_factory_of_a_model_that_runs_is_misuse(
    command: Command, factory: str, expected: str
) -> None:
    assert expected in command("verify", factory, code=2).err
