"""`modtrace ops`: shows the costs of the ops of a step."""

import click

from ..analysis.ops.groups import GROUPED_BY, GroupedBy
from ..analysis.ops.op_table import build_op_table
from ..recording.phase import PHASES
from ..views.text.op_table import render_op_table, render_op_table_json
from .open_run import (
    SHOWN_ALONE,
    AskedStep,
    errors_of,
    open_with_rows,
    read_step,
    require_ops_of,
    step_option,
    steps_option,
)
from .output import find_screenful, print_text, print_view


@click.command()
@click.argument("run")
@step_option(SHOWN_ALONE)
@steps_option()
@click.option(
    "--by",
    type=click.Choice(GROUPED_BY),
    default="module",
    show_default=True,
    help="What ops are summed up by; `op`: by name, `call`: each forward with its backward.",
)
@click.option("--phase", type=click.Choice(PHASES), help="Only ops of this phase. Default: all.")
@click.option("--no-fold", is_flag=True, help="A row for each of several modules that are alike.")
@click.option(
    "--top", type=click.IntRange(min=1), help="Rows to show. Default: a screenful on a terminal, else all."
)
@click.option("--json", "as_json", is_flag=True, help="The same as JSON, times in nanoseconds.")
def ops(
    run: str,
    step: AskedStep,
    steps: str | None,
    by: GroupedBy,
    phase: str | None,
    no_fold: bool,
    top: int | None,
    as_json: bool,
) -> None:
    """Shows what the ops of the recording RUN cost in a step: time, floating-point operations, bytes.

    A module counts with its own ops, without those of the modules inside it. The most expensive come first.
    """
    data = open_with_rows(run, "ops")
    number = read_step(run, data, step)
    with errors_of(run, data, option="--step" if steps is None else None):
        table = build_op_table(
            data, step=number, steps=steps, by=by, phase=phase, fold=not (no_fold or as_json)
        )
        require_ops_of(data, table.step, phase)
    if as_json:
        print_text(render_op_table_json(table, top=top))
        return
    print_view(render_op_table, table, top=top or find_screenful(), more="--top")
