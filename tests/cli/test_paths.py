"""`modtrace paths`, of a recording and of a model that a function makes."""

import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from builders import RecordingBuilder, TypedRecording
from helpers.command_line import Command
from modtrace.store.copy import write_recording

MODELS = """
from torch import nn, zeros

def make():
    return nn.Sequential(nn.Linear(2, 3), nn.ReLU()), (zeros(1, 2),)

def make_wrong():
    return nn.Linear(2, 3), (zeros(1, 5),)
"""


def recording() -> TypedRecording:
    build = RecordingBuilder(argv=("train.py",), complete=True)
    net = build.module("", "Net")
    head = build.module("head", "Linear", parent=net)
    build.step(0, 0, 8_000)
    outer = build.call(net, 0, 5_000, nth=0)
    for nth in range(2):
        call = build.call(head, 1_000 * nth, 1_000 * nth + 900, parent=outer, nth=nth)
        build.op(call, "aten.addmm.default", 1_000 * nth, 1_000 * nth + 800)
    build.op(outer, "aten.relu.default", 4_000, 4_500)
    build.op(build.backward(outer, 6_000, 7_000), "aten.threshold_backward.default", 6_100, 6_200)
    return build.data()


@pytest.fixture
def folder(tmp_path: Path) -> str:
    path = str(tmp_path / "run.modtrace")
    write_recording(recording(), path)
    return path


@pytest.fixture
def models(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """`models_of_paths.py` in the current directory."""
    (tmp_path / "models_of_paths.py").write_text(MODELS)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    yield
    sys.modules.pop("models_of_paths", None)


def test_shows_each_op_with_its_call(command: Command, folder: str) -> None:
    assert command("paths", folder).out == (
        "train.py\n"
        "step 0 (train), 8.00us; 1 step recorded\n"
        "\n"
        "op                               module  type    phase\n"
        "aten.addmm.default               head    Linear  forward\n"
        "aten.addmm.default               head@1  Linear  forward\n"
        "aten.relu.default                Net     Net     forward\n"
        "aten.threshold_backward.default  Net     Net     backward\n"
    )


def test_modules_alone_come_in_order(command: Command, folder: str) -> None:
    assert command("paths", folder, "--modules", "--phase", "forward").out == "head\nNet\n"


def test_json_has_as_many_ops_as_asked_for(command: Command, folder: str) -> None:
    found = json.loads(command("paths", folder, "--json", "--top", "2", "--step", "0").out)
    assert [row["name"] for row in found["rows"]] == ["head", "head@1"]
    assert found["modules"] == ["head", ""]


def test_model_of_a_function_is_called_once_under_a_recording_of_ops(
    command: Command, models: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[tuple[str, dict[str, Any]]] = []

    @contextmanager
    def record(model: object, **options: Any) -> Iterator[SimpleNamespace]:
        asked.append((type(model).__name__, options))
        yield SimpleNamespace(data=recording())

    monkeypatch.setitem(sys.modules, "modtrace.api.record", SimpleNamespace(record=record))
    printed = command("paths", "models_of_paths:make", "--modules", "--phase", "forward")
    assert asked == [("Sequential", {"ops": True, "values": None})]
    assert printed.out == "head\nNet\n"


def test_ops_of_a_real_model_are_shown(command: Command, models: None) -> None:
    assert command("paths", "models_of_paths:make", "--modules").out == "0\n1\n"


def test_model_that_raises_is_one_line_and_exit_code_2(command: Command, models: None) -> None:
    [line] = command("paths", "models_of_paths:make_wrong", code=2).err.splitlines()
    assert line.startswith(
        "modtrace: error: models_of_paths:make_wrong: calling the model raised RuntimeError: mat1 and mat2"
    )


def test_folder_whose_name_looks_like_a_function_is_opened(
    command: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    write_recording(recording(), "run:first")

    assert command("paths", "run:first", "--modules").out == "head\nNet\n"
