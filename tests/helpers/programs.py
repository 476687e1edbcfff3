"""Skips a test whose program or library is not on this machine, and fails it where CI promises to have it."""

import os
import shutil
import sys
from importlib import import_module
from importlib.machinery import PathFinder
from pathlib import Path
from types import ModuleType
from typing import NoReturn

import pytest

#: Where `make env` puts the package without what it needs (its server, and a library of 500 MB).
_MODEL_EXPLORER = Path(sys.prefix) / "model-explorer"


def needs_program(name: str) -> str:
    """The path of a program; where it is missing the test is skipped, or fails if `CI` is "true"."""
    found = shutil.which(name)
    if found is None:
        _do_without(f"the program {name!r} is not installed (.ci/run installs it)")
    return found


def needs_file(path: Path, how: str) -> Path:
    """The path; where nothing is there the test is skipped, or fails if `CI` is "true"."""
    if not path.exists():
        _do_without(f"{path} is not there ({how})")
    return path


def load_model_explorer(part: str) -> ModuleType:
    """The module `model_explorer.<part>`, such as `graph_builder`, without the server that the package starts with."""
    spec = PathFinder.find_spec("model_explorer", [*sys.path, str(_MODEL_EXPLORER)])
    if spec is None or spec.submodule_search_locations is None:
        _do_without("ai-edge-model-explorer is not installed (make env installs it)")
    package = ModuleType("model_explorer")
    package.__path__ = list(spec.submodule_search_locations)
    sys.modules.setdefault("model_explorer", package)
    return import_module(f"model_explorer.{part}")


def _do_without(why: str) -> NoReturn:
    if os.environ.get("CI") == "true":
        pytest.fail(f"{why}, and CI is 'true': all tests must run")
    pytest.skip(why)
