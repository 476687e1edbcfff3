"""The progress of a recording is reported on a terminal, on lines of its own."""

import io
import os
from types import SimpleNamespace

import pytest

from modtrace.cli.progress import ProgressReporter


class StandardError(io.StringIO):
    """A stream that may be a terminal, ten columns wide."""

    is_terminal = True

    def fileno(self) -> int:
        if not self.is_terminal:
            raise OSError("no terminal")
        return 2


class Run:
    """A run that is reported on."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.stderr = StandardError()
        monkeypatch.setattr("sys.stderr", self.stderr)
        monkeypatch.setenv("COLUMNS", "99")  # of standard output, which may be another terminal
        monkeypatch.setattr(os, "get_terminal_size", lambda _: os.terminal_size((10, 5)))
        self.progress = SimpleNamespace(steps=0, rows=0)
        self.reporter = ProgressReporter(self, lambda progress: f"{progress.steps} steps", quiet=False)

    def report(self, steps: int) -> None:
        self.progress = SimpleNamespace(steps=steps, rows=3 * steps)
        self.reporter.report()


def test_nothing_is_reported_before_anything_has_run(monkeypatch: pytest.MonkeyPatch) -> None:
    run = Run(monkeypatch)
    run.report(0)
    run.reporter.end(())
    assert run.stderr.getvalue() == ""


def test_progress_is_reported_once_until_more_has_run(monkeypatch: pytest.MonkeyPatch) -> None:
    run = Run(monkeypatch)
    run.stderr.is_terminal = False
    for steps in (1, 1, 2):
        run.report(steps)
    assert run.stderr.getvalue() == "modtrace: 1 steps so far\nmodtrace: 2 steps so far\n"


def test_line_that_the_program_has_left_open_stays_on_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    run = Run(monkeypatch)
    print("loading", end="", file=run.stderr)
    run.reporter.end(["recorded 4 steps."])
    lines = _show(run.stderr.getvalue(), 10)
    assert lines == ["loading", "modtrace: recorded 4 steps."]


def test_line_that_is_empty_is_used_on_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    run = Run(monkeypatch)
    print("loaded", file=run.stderr)
    run.reporter.end(["recorded 4 steps."])
    assert _show(run.stderr.getvalue(), 10) == ["loaded", "modtrace: recorded 4 steps."]


def test_nothing_is_reported_while_a_program_runs_whose_errors_go_to_a_file(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(StandardError, "is_terminal", False)
    run = Run(monkeypatch)
    assert run.reporter._thread.ident is None
    run.reporter.end(["recorded 4 steps."])
    assert run.stderr.getvalue() == "modtrace: recorded 4 steps.\n"


def _show(text: str, columns: int) -> list[str]:
    """Returns the lines of a terminal after a text, whose last lines are not cut."""
    before, _, last = text.rpartition("\r")
    lines = [""]
    for character in before:
        if character == "\n" or len(lines[-1]) == columns:
            lines.append("")
        lines[-1] += "" if character == "\n" else character
    return [*(line.rstrip() for line in lines[:-1]), last.rstrip("\n")]
