"""Runs `modtrace` in this process."""

import sys
from collections.abc import Callable
from typing import NamedTuple

import pytest

from modtrace.cli.main import main


def run_command(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> int:
    """Its exit code."""
    monkeypatch.setattr(sys, "argv", ["modtrace", *arguments])
    with pytest.raises(SystemExit) as exit_info:
        main()
    assert isinstance(exit_info.value.code, int)
    return exit_info.value.code


class Printed(NamedTuple):
    """What a command has printed."""

    out: str
    err: str


#: Runs `modtrace` with these arguments, and asserts that its exit code is `code`, which is 0 unless it is given.
Command = Callable[..., Printed]
