"""The progress of a recording is told on lines that the program leaves free."""

import io
from types import SimpleNamespace

import pytest

from modtrace.cli.progress import ProgressReporter, leaves_line_open


class StandardError(io.StringIO):
    """A stream whose `write` can be replaced, as that of a file can."""


class Run:
    """A run that is reported on; the steps that have run are told to it."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.stderr = StandardError()
        monkeypatch.setattr("sys.stderr", self.stderr)
        self.progress = SimpleNamespace(steps=0, rows=0)
        self.reporter = ProgressReporter(self, lambda progress: f"{progress.steps} steps", quiet=False)

    def tell(self, steps: int) -> None:
        self.progress = SimpleNamespace(steps=steps, rows=3 * steps)
        self.reporter.tell()


def test_nothing_is_told_before_anything_has_run(monkeypatch: pytest.MonkeyPatch) -> None:
    run = Run(monkeypatch)
    run.tell(0)
    assert run.stderr.getvalue() == ""


def test_progress_is_told_once_until_more_has_run(monkeypatch: pytest.MonkeyPatch) -> None:
    run = Run(monkeypatch)
    for steps in (1, 1, 2):
        run.tell(steps)
    assert run.stderr.getvalue() == "modtrace: 1 steps so far\nmodtrace: 2 steps so far\n"


@pytest.mark.parametrize("written", ["\r 40%|####      | 4/10", "step 3\r", "loading ..."])
def test_progress_waits_while_the_program_has_a_line_open(
    monkeypatch: pytest.MonkeyPatch, written: str
) -> None:
    run = Run(monkeypatch)
    print(written, end="", file=run.stderr)
    run.tell(1)
    assert run.stderr.getvalue() == written
    print(file=run.stderr)
    run.tell(2)
    assert run.stderr.getvalue() == f"{written}\nmodtrace: 2 steps so far\n"


def test_last_lines_begin_below_a_line_that_is_open_and_the_stream_is_as_before(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    run = Run(monkeypatch)
    print("\r 40%|####      | 4/10", end="", file=run.stderr)
    run.reporter.end(["recorded 4 steps."])
    assert run.stderr.getvalue() == "\r 40%|####      | 4/10\nmodtrace: recorded 4 steps.\n"
    assert "write" not in vars(run.stderr)


@pytest.mark.parametrize(
    ("texts", "is_open"),
    [
        ((), False),
        (("done\n",), False),
        (("wait",), True),
        (("wait", "\n"), False),
        (("wait", ""), True),
        (("step 1\r", "step 2\r"), True),
        (("\r 100%|####|", "\r          \r"), False),  # tqdm(leave=False)
        (("bar\nend",), True),
        (("bar", "\r"), True),
        (("bar", "\rdone\n"), False),
    ],
)
def test_line_is_open_where_something_stands_on_it(texts: tuple[str, ...], is_open: bool) -> None:
    found = False
    for text in texts:
        found = leaves_line_open(text, found)
    assert found is is_open
