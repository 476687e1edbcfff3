"""Models that `module:factory` on the command line means."""

import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import click
import pytest
import torch
from torch import nn

from modtrace.cli.factory import LoadedModel, call_model, is_factory, load_factory

Write = Callable[[str], None]


@pytest.fixture
def write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Write]:
    """Writes `factory_models.py` into the current directory, which is not in `sys.path`."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    before = set(sys.modules)

    def write_module(source: str) -> None:
        (tmp_path / "factory_models.py").write_text(source)

    yield write_module
    for name in set(sys.modules) - before:
        if name.startswith("factory_models"):
            del sys.modules[name]


def error_of(text: str) -> str:
    with pytest.raises(click.ClickException) as caught:
        load_factory(text)
    return caught.value.message


@pytest.mark.parametrize(
    ("returned", "args", "kwargs"),
    [
        ("(nn.ReLU(),)", (), {}),
        ("(nn.ReLU(), (1,))", (1,), {}),
        ("(nn.ReLU(), [1, 2])", (1, 2), {}),
        ("(nn.ReLU(), (), {'input': 3})", (), {"input": 3}),
        ("(nn.ReLU(), (1,), {'inplace': True})", (1,), {"inplace": True}),
    ],
)
def test_factory_gives_a_model_and_what_it_is_called_with(
    write: Write, returned: str, args: tuple[object, ...], kwargs: dict[str, object]
) -> None:
    write(f"from torch import nn\ndef make():\n    return {returned}\n")
    loaded = load_factory("factory_models:make")
    assert isinstance(loaded.model, nn.ReLU)
    assert (loaded.args, loaded.kwargs) == (args, kwargs)


def test_module_may_lie_in_a_package(write: Write, tmp_path: Path) -> None:
    package = tmp_path / "factory_models"
    package.mkdir()
    (package / "small.py").write_text("from torch import nn\nmake = lambda: (nn.ReLU(),)\n")
    assert isinstance(load_factory("factory_models.small:make").model, nn.ReLU)


@pytest.mark.parametrize(
    "text", ["models", "models:", ":make", "a/b.py:make", "a:b:c", "C:\\runs\\x", "1a:b"]
)
def test_other_forms_are_no_factory(text: str) -> None:
    assert not is_factory(text)
    assert error_of(text) == f"{text!r}: give MODULE:FACTORY, such as models.gpt:make_gpt"


def test_module_that_does_not_exist_is_told_with_where_it_was_looked_for(
    tmp_path: Path, write: Write
) -> None:
    assert error_of("factory_models:make") == (
        f"factory_models:make: there is no module 'factory_models' (looked from {tmp_path} and in sys.path)"
    )
    assert error_of("factory_models.deep.er:make").startswith(
        "factory_models.deep.er:make: there is no module 'factory_models' (looked from "
    )


def test_module_that_raises_is_told_with_the_line(write: Write) -> None:
    write("x = 1\ny = x / 0\n")
    assert error_of("factory_models:make") == (
        "factory_models:make: importing factory_models raised ZeroDivisionError: division by zero"
        " (factory_models.py:2)"
    )


def test_module_that_misses_a_library_is_not_taken_for_missing_itself(write: Write) -> None:
    write("import a_library_that_is_not_there\n")
    assert error_of("factory_models:make") == (
        "factory_models:make: importing factory_models raised ModuleNotFoundError:"
        " No module named 'a_library_that_is_not_there' (factory_models.py:1)"
    )


def test_module_that_is_no_python_is_told(write: Write) -> None:
    write("def make(:\n")
    assert error_of("factory_models:make").startswith(
        "factory_models:make: importing factory_models raised SyntaxError: invalid syntax"
    )


def test_module_that_exits_does_not_end_the_command_silently(write: Write) -> None:
    write("import sys\nsys.exit('no arguments given')\n")
    assert error_of("factory_models:make") == (
        "factory_models:make: importing factory_models raised SystemExit: no arguments given"
        " (factory_models.py:2)"
    )


def test_name_that_does_not_exist_is_told_with_the_nearest(write: Write) -> None:
    write("def make_gpt(): ...\ndef make_vit(): ...\n")
    assert error_of("factory_models:mak_gpt") == (
        "factory_models:mak_gpt: factory_models has no 'mak_gpt'; the nearest names are: make_gpt, make_vit"
    )


def test_where_no_name_is_near_what_the_module_defines_is_told(write: Write) -> None:
    write("import os\nfrom math import sqrt\ndef model(): ...\nclass Net: ...\n_private = 1\n")
    assert error_of("factory_models:zzz") == (
        "factory_models:zzz: factory_models has no 'zzz'; it has: model, Net"
    )
    write("")
    sys.modules.pop("factory_models")
    assert error_of("factory_models:zzz").endswith("it has: nothing of its own")


WANTED = "it must return (model, args, kwargs), (model, args) or (model,)"


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("make = 3", f"this is no function but an int. Give a function; {WANTED}."),
        ("def make(size): ...", "the factory raised TypeError: make() missing 1 required positional argument: 'size'"),
        (
            "def make():\n    raise ValueError('bad\\nsize')",
            "the factory raised ValueError: bad size (factory_models.py:3)",
        ),
        ("def make(): ...", f"the factory returned None; {WANTED}."),
        ("def make(): return nn.ReLU()", f"the factory returned a ReLU; {WANTED}."),
        ("def make(): return [nn.ReLU()]", f"the factory returned a list; {WANTED}."),
        ("def make(): return ()", f"the factory returned a tuple of 0 values; {WANTED}."),
        ("def make(): return 1, 2, 3, 4", f"the factory returned a tuple of 4 values; {WANTED}."),
        ("def make(): return (3, ())", "the model is not a torch.nn.Module but an int."),
        (
            "def make(): return nn.ReLU(), torch.ones(2)",
            "args is not a tuple but a Tensor. Write (args,) for a single argument.",
        ),
        (
            "def make(): return nn.ReLU(), (), (1,)",
            "kwargs is not a dict of names and values but a tuple.",
        ),
        (
            "def make(): return nn.ReLU(), (), {1: 2}",
            "kwargs is not a dict of names and values but a dict.",
        ),
    ],
)  # fmt: skip
def test_what_is_no_model_with_its_arguments_is_told(write: Write, source: str, expected: str) -> None:
    write(f"import torch; from torch import nn\n{source}\n")
    assert error_of("factory_models:make").startswith(f"factory_models:make: {expected}")


def test_model_is_called_with_its_arguments() -> None:
    loaded = LoadedModel(nn.Linear(2, 2), (torch.ones(1, 2),))
    assert call_model("m:f", loaded).shape == (1, 2)


def test_model_that_raises_is_told() -> None:
    class Fails(nn.Module):
        def forward(self) -> None:
            raise RuntimeError("out of order")

    with pytest.raises(click.ClickException) as caught:
        call_model("m:f", LoadedModel(Fails()))
    assert caught.value.message.startswith("m:f: calling the model raised RuntimeError: out of order (")
    assert "test_factory.py:" in caught.value.message
