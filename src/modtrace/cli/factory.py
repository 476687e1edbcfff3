"""Makes the model that `module:factory` on the command line names."""

import difflib
import importlib
import os
import re
import sys
import traceback
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any

import click

from ..optional import require

_FACTORY = re.compile(r"[^\W\d]\w*(\.[^\W\d]\w*)*:[^\W\d]\w*")
_WANTED = "it must return (model, args, kwargs), (model, args) or (model,)"
_LEFT_OUT: tuple[Any, ...] = (None, (), {})  # values for parts of a result that are missing
_PACKAGE = os.path.join(os.path.dirname(os.path.dirname(os.path.abspath(__file__))), "")
_NAMED = 5  # how many names are listed if none is similar


@dataclass(frozen=True)
class LoadedModel:
    """A model, and the arguments of its call."""

    model: Any  # a torch.nn.Module
    args: tuple[Any, ...] = ()
    kwargs: dict[str, Any] = field(default_factory=dict)


def is_factory(text: str) -> bool:
    """Returns whether the text has the form `package.module:function`."""
    return _FACTORY.fullmatch(text) is not None


def names_model(run: str) -> bool:
    """Returns whether an argument names a model's factory, and not an existing file or folder."""
    return is_factory(run) and not os.path.exists(run)


def load_factory(text: str) -> LoadedModel:
    """Imports the module of `module:factory`, from the current directory too, and calls the factory.

    Raises:
        click.ClickException: there is no such module or function, one of them raises, or what the function
            returns is not a model with its arguments.
        MissingLibraryError: torch is not installed.
    """
    if not is_factory(text):
        raise click.ClickException(f"{text!r}: give MODULE:FACTORY, such as models.gpt:make_gpt")
    torch = require("torch", f"calling {text}")
    module_name, _, name = text.partition(":")
    with _own_arguments(text):
        made = _call(text, _find_factory(text, _import(text, module_name), name))
    return _check(text, made, torch.nn.Module)


@contextmanager
def _own_arguments(text: str) -> Iterator[None]:
    """Hides the command's arguments from modules that parse `sys.argv` when they are imported."""
    arguments = sys.argv
    sys.argv = [text]
    try:
        yield
    finally:
        sys.argv = arguments


def call_model(text: str, loaded: LoadedModel) -> Any:
    """Returns the output of the model for its arguments.

    Raises:
        click.ClickException: it raises an exception.
    """
    with errors_of_call(text):
        return loaded.model(*loaded.args, **loaded.kwargs)


@contextmanager
def errors_of_call(text: str) -> Iterator[None]:
    """Turns an exception of the block, which calls the model of the factory `text`, into one line.

    Raises:
        click.ClickException: the block raises an exception.
    """
    try:
        yield
    except Exception as error:
        raise click.ClickException(f"{text}: calling the model raised {locate_error(error)}") from error


def _import(text: str, name: str) -> ModuleType:
    if not getattr(sys.flags, "safe_path", False) and os.getcwd() not in sys.path:  # -P, new in Python 3.11
        sys.path.insert(0, os.getcwd())
    try:
        return importlib.import_module(name)
    except (Exception, SystemExit) as error:
        if isinstance(error, ModuleNotFoundError) and error.name and f"{name}.".startswith(f"{error.name}."):
            raise click.ClickException(
                f"{text}: there is no module {error.name!r} (looked from {os.getcwd()} and in sys.path)"
            ) from error
        raise click.ClickException(f"{text}: importing {name} raised {locate_error(error)}") from error


def _find_factory(text: str, module: ModuleType, name: str) -> Any:
    try:
        return getattr(module, name)
    except AttributeError as error:
        raise click.ClickException(
            f"{text}: {module.__name__} has no {name!r}; {_describe_names(module, name)}"
        ) from error


def _describe_names(module: ModuleType, name: str) -> str:
    """Returns a list of similar names in the module, or else of names that may be factories."""
    public = [name for name in vars(module) if not name.startswith("_")]
    near = difflib.get_close_matches(name, public, n=_NAMED)
    if near:
        return f"the nearest names are: {', '.join(near)}"
    own = [name for name in public if getattr(vars(module)[name], "__module__", None) == module.__name__]
    return f"it has: {', '.join(own[:_NAMED]) or 'nothing of its own'}"


def _call(text: str, factory: Any) -> Any:
    if not callable(factory):
        raise click.ClickException(
            f"{text}: this is no function but {_name_type(factory)}. Give a function; {_WANTED}."
        )
    try:
        return factory()
    except (Exception, SystemExit) as error:
        raise click.ClickException(f"{text}: the factory raised {locate_error(error)}") from error


def _check(text: str, made: Any, module_type: type) -> LoadedModel:
    if not isinstance(made, tuple) or not 1 <= len(made) <= 3:
        raise click.ClickException(f"{text}: the factory returned {_describe_value(made)}; {_WANTED}.")
    model, args, kwargs = (*made, *_LEFT_OUT[len(made) :])
    if not isinstance(model, module_type):
        raise click.ClickException(f"{text}: the model is not a torch.nn.Module but {_name_type(model)}.")
    if not isinstance(args, tuple | list):
        raise click.ClickException(
            f"{text}: args is not a tuple but {_name_type(args)}. Write (args,) for a single argument."
        )
    if not isinstance(kwargs, Mapping) or not all(isinstance(key, str) for key in kwargs):
        raise click.ClickException(
            f"{text}: kwargs is not a dict of names and values but {_name_type(kwargs)}."
        )
    return LoadedModel(model, tuple(args), dict(kwargs))


def _describe_value(made: Any) -> str:
    if isinstance(made, tuple):
        return f"a tuple of {len(made)} values"
    return "None" if made is None else _name_type(made)


def _name_type(value: Any) -> str:
    """Returns the class name of a value with its article: `a Tensor`, `an Embedding`."""
    name = type(value).__name__
    return f"an {name}" if name[:1].lower() in "aeiou" else f"a {name}"


def locate_error(error: BaseException) -> str:
    """Returns an exception in one line with the place where it was raised: `ValueError: boom (models.py:3)`."""
    said = " ".join(str(error).split())
    frames = [
        frame for frame in traceback.extract_tb(error.__traceback__) if "importlib" not in frame.filename
    ]
    frames = [frame for frame in frames if not frame.filename.startswith(_PACKAGE)]
    own = [frame for frame in frames if f"{os.sep}site-packages{os.sep}" not in frame.filename]
    place = f" ({_shorten((own or frames)[-1].filename)}:{(own or frames)[-1].lineno})" if frames else ""
    notes = "".join(f"; {note}" for note in getattr(error, "__notes__", ()))
    return f"{type(error).__name__}{': ' if said else ''}{said}{place}{notes}"


def _shorten(file: str) -> str:
    """Returns the path of a file relative to the current directory, if the file is below it."""
    return file.removeprefix(os.path.join(os.getcwd(), ""))
