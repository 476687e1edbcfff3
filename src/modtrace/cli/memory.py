"""`modtrace memory`: shows which modules keep memory for the backward of a step."""

import click

from ..analysis.ops.memory_table import build_memory_table
from ..views.text.memory_table import render_memory_table, render_memory_table_json
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
@click.option("--ops", is_flag=True, help="Below each module, which of its ops save how much.")
@click.option("--no-fold", is_flag=True, help="A row for each of several modules that are alike.")
@click.option(
    "--top", type=click.IntRange(min=1), help="Modules to show. Default: a screenful on a terminal, else all."
)
@click.option("--json", "as_json", is_flag=True, help="The same as JSON, sizes in bytes.")
def memory(
    run: str, step: AskedStep, steps: str | None, ops: bool, no_fold: bool, top: int | None, as_json: bool
) -> None:
    """Shows what the modules of the recording RUN save for backward, and what their calls allocate.

    The modules whose own ops save most come first.
    """
    data = open_with_rows(run, "ops")
    number = read_step(run, data, step)
    with errors_of(run, data, option="--step" if steps is None else None):
        table = build_memory_table(data, step=number, steps=steps, ops=ops, fold=not (no_fold or as_json))
        require_ops_of(data, table.step)
    if as_json:
        print_text(render_memory_table_json(table, top=top))
        return
    print_view(render_memory_table, table, top=top or find_screenful(), more="--top")
