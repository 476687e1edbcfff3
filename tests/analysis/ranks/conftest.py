"""What the tests of the command line share."""

import pytest

from helpers.command_line import Command, Printed, run_command


@pytest.fixture
def command(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Command:
    def run(*arguments: str, code: int = 0) -> Printed:
        capsys.readouterr()  # what came before
        assert run_command(monkeypatch, *arguments) == code
        return Printed(*capsys.readouterr())

    return run
