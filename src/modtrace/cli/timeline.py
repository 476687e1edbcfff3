"""`modtrace timeline`: writes a trace for ui.perfetto.dev or chrome://tracing."""

import json
import os
import sys

import click

from ..analysis.timeline.timeline import Timeline, build_timeline
from ..recording.options.schedule import StepRange, to_step_range
from ..recording.suggestions import count_of
from ..views.common.numbers import format_bytes
from ..views.formats.perfetto import count_events, describe_missing, iterate_perfetto, write_perfetto
from .open_run import AskedStep, errors_of, open_with_rows, read_step, step_option
from .output import print_text, tell, tell_marks, wrap

_STDOUT = "-"


@click.command()
@click.argument("run")
@click.option(
    "-o", "--output", "path", metavar="FILE", help="Where to write; - for standard output, the default."
)
@step_option("The only step to show.")
@click.option("--steps", "wanted", metavar="START:STOP[:EVERY]", help="Which steps to show. Default: all.")
@click.option("--ops/--no-ops", default=None, help="With the ops or without. Default: with, if recorded.")
@click.option("--op-flows", is_flag=True, help="Arrows from forward ops to those of their backward too.")
@click.option("--json", "as_json", is_flag=True, help="With -o FILE: what was written, as JSON.")
def timeline(
    run: str,
    path: str | None,
    step: AskedStep,
    wanted: str | None,
    ops: bool | None,
    op_flows: bool,
    as_json: bool,
) -> None:
    """Writes the times of what ran in the recording RUN as a trace for ui.perfetto.dev or chrome://tracing.

    It has lanes for the steps, forward, recompute, backward and optimizer of each thread, in which spans nest as
    modules do. Arrows lead from each forward to its backward and to its recompute.
    """
    if path is None and not as_json and sys.stdout.isatty():
        raise click.UsageError("give -o FILE, or -o - to print the trace.")
    if op_flows and ops is False:
        raise click.UsageError("--op-flows are arrows between ops: leave --no-ops out.")
    data = open_with_rows(run, "calls", *(["ops"] if ops or op_flows else []))
    number = read_step(run, data, step)
    if number is not None and wanted is not None:
        raise click.UsageError("give --step or --steps, not both.")
    with errors_of(run, data, option=None if number is None else "--step"):
        steps = to_step_range(wanted) if number is None else StepRange(number, number + 1)
        found = build_timeline(data, steps=steps, ops=ops is not False, op_flows=op_flows)
    if path is None or path == _STDOUT:
        for piece in iterate_perfetto(found):
            print_text(piece)
    else:
        write_perfetto(found, path)
        tell(_render_written_json(found, path) if as_json else wrap(_describe_written(found, path)), path)
    tell_marks(found.marks)
    missing = describe_missing(found)
    if missing is not None:  # on standard error, as the trace may be on standard output
        click.echo(wrap(missing), nl=False, err=True)


def _describe_written(found: Timeline, path: str) -> str:
    steps, size = count_of(len(found.steps), "step"), format_bytes(_size_bytes(path))
    what = f"{path}: {count_events(found):,} events of {steps}, {size}."
    return f"{what} Open it at ui.perfetto.dev or chrome://tracing.\n"


def _render_written_json(found: Timeline, path: str) -> str:
    told = {
        "path": path,
        "events": count_events(found),
        "steps": found.steps,
        "size_bytes": _size_bytes(path),
    }
    return json.dumps({**told, "missing": describe_missing(found), "marks": found.marks}) + "\n"


def _size_bytes(path: str) -> int:
    return os.path.getsize(path) if os.path.isfile(path) else 0
