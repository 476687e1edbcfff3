"""`modtrace view`: writes a report for the browser."""

import os
import time
from pathlib import Path

import click

from ..analysis.divergence.answer import Comparison
from ..analysis.divergence.compare import compare_recordings
from ..analysis.tables.missing_rows import explain_empty
from ..api.report import MAX_MB, make_report
from ..errors import NothingRecordedError
from ..recording.protocols import RecordingData
from ..store.reader import FolderReader
from ..views.common.numbers import format_bytes
from ..views.common.whole_file import write_pieces
from .follow import FollowedReport, ReportServer
from .open_run import AskedStep, errors_of, hold, open_together, open_with_rows, read_step, step_option
from .output import print_text, tell, tell_marks, wrap

_STDOUT = "-"
_STEP = (
    "The step to show. Default: that of the first NaN or infinite values, or of the first difference, or else the last "
    "complete training step."
)


@click.command()
@click.argument("run")
@click.option(
    "-o",
    "--output",
    "path",
    metavar="FILE",
    help="Where to write; - for standard output. Default: RUN.html in the current folder.",
)
@step_option(_STEP)
@click.option(
    "--max-mb", type=float, default=MAX_MB, show_default=True, help="The size of the file at most, in MB."
)
@click.option(
    "--against",
    metavar="OTHER",
    help="Another recording: modules and graph show how RUN and OTHER differ, and open where they part.",
)
@click.option(
    "--map",
    "rules",
    multiple=True,
    metavar="EXPRESSION=PATH",
    help="How modules of RUN are called in OTHER, as for compare; auto finds it. Several may be given.",
)
@click.option(
    "--follow",
    is_flag=True,
    help="Serve the report on this machine while RUN is recorded, with new steps as they come, until Ctrl-C.",
)
def view(
    run: str,
    path: str | None,
    step: AskedStep,
    max_mb: float,
    against: str | None,
    rules: tuple[str, ...],
    follow: bool,
) -> None:
    """Writes a report of the recording RUN: one file for the browser, which loads nothing.

    It has the module tree, the graph and the timeline of one step, and the values over all steps. What there is no
    room for is left out, and the page says so.
    """
    # Two runs are compared as `modtrace compare` does it: of each all ranks, or those that --rank chooses.
    opened = open_with_rows(run) if against is None else open_together(run)
    data = hold(opened)
    number = read_step(run, data, step)
    if rules and against is None:
        raise click.BadParameter("give the other recording, too: --against OTHER", param_hint="--map")
    if follow:
        if path is not None or against is not None:
            raise click.UsageError(
                "--follow serves one recording and writes no file: leave -o and --against out."
            )
        _follow(opened, number, max_mb)
        return
    comparison = _compare(data, run, against, rules) if against is not None else None
    with errors_of(run, data):
        page = make_report(
            data, step=number, max_mb=max_mb, comparison=comparison, names=_name_runs(run, against or "")
        )
    _write(page, run, path)
    nothing = explain_empty(data)
    if nothing:
        raise NothingRecordedError(f"{run}: {nothing}")
    if path != _STDOUT:
        tell_marks(data.meta.marks)


def _follow(data: RecordingData, step: int | None, max_mb: float) -> None:
    """Serves the report until Ctrl-C."""
    assert isinstance(data, FolderReader)  # several ranks are not shown together
    with ReportServer(FollowedReport(data, step=step, max_mb=max_mb)) as server:
        print_text(wrap(f"{server.url}\nOpen it in a browser of this machine. Ctrl-C ends it.\n"))
        try:
            while True:
                time.sleep(3600)
        except KeyboardInterrupt:
            print_text("ended\n")


def _compare(data: RecordingData, run: str, against: str, rules: tuple[str, ...]) -> Comparison:
    other = open_together(against)
    with errors_of(f"{run} and {against}", data):
        return compare_recordings(data, other, rules=rules)


def _name_runs(run: str, against: str) -> tuple[str, str]:
    """Returns the names of two recordings: those of their folders, or their paths where these are equal."""
    one, other = (Path(os.path.abspath(path)).name for path in (run, against))
    return (run, against) if one == other else (one, other)


def _write(page: str, run: str, path: str | None) -> None:
    """Writes the page, and prints its path unless it goes to standard output."""
    if path == _STDOUT:
        print_text(page)
        return
    to = path or f"{Path(os.path.abspath(run)).stem}.html"
    write_pieces([page], to)
    size = format_bytes(os.path.getsize(to)) if os.path.isfile(to) else format_bytes(len(page))
    tell(wrap(f"{to}: {size}. Open it in a browser.\n"), to)
