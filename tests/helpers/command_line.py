"""Runs `modtrace` in this process."""

import sys

import pytest

from modtrace.cli.main import main


def run_command(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> int:
    """Its exit code."""
    monkeypatch.setattr(sys, "argv", ["modtrace", *arguments])
    with pytest.raises(SystemExit) as exit_info:
        main()
    assert isinstance(exit_info.value.code, int)
    return exit_info.value.code
