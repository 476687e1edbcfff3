"""`modtrace show`: shows the module tree of a recording with the times and values of its steps."""

import click

from ..analysis.findings.all_checks import CHECKS
from ..analysis.findings.check import run_checks
from ..analysis.findings.nonfinite_values import find_bad_step
from ..analysis.modules.module_tree import build_module_tree
from ..views.text.show_module_tree import SORT_KEYS, SortKey, render_module_tree
from ..views.text.show_module_tree_json import render_module_tree_json
from .open_run import SHOWN_ALONE, AskedStep, errors_of, open_with_rows, read_step, step_option, steps_option
from .output import print_text, print_view


@click.command()
@click.argument("run")
@step_option(SHOWN_ALONE)
@steps_option()
@click.option("--depth", type=click.IntRange(min=0), help="Levels below the roots. Default: all.")
@click.option(
    "--sort",
    type=click.Choice(SORT_KEYS),
    default="order",
    show_default=True,
    help="What siblings are sorted by; `order`: as registered.",
)
@click.option("--no-fold", is_flag=True, help="Show the inside of each of several modules that are alike.")
@click.option("--types/--no-types", default=True, show_default=True, help="The table of module types.")
@click.option("--slots", is_flag=True, help="A line for each slot of what a module returned.")
@click.option("--json", "as_json", is_flag=True, help="Everything as JSON, unfolded, times in nanoseconds.")
def show(
    run: str,
    step: AskedStep,
    steps: str | None,
    depth: int | None,
    sort: SortKey,
    no_fold: bool,
    types: bool,
    slots: bool,
    as_json: bool,
) -> None:
    """Shows the module tree of the recording RUN: medians of the times in its newest training steps that are alike.

    Values are those of the last of these steps, or of the first with NaN or infinite values if these are an error.
    The first lines tell what is wrong with the run, the worst three; of all `modtrace check` tells more.
    """
    data = open_with_rows(run, "calls")
    findings = run_checks(data, CHECKS)
    number = read_step(run, data, step)
    values_step = find_bad_step(findings) if number is None and steps is None else None
    with errors_of(run, data, option="--step" if steps is None else None):
        tree = build_module_tree(data, step=number, steps=steps, values_step=values_step)
    if as_json:
        print_text(render_module_tree_json(tree, findings))
        return
    print_view(
        render_module_tree,
        tree,
        findings=findings,
        depth=depth,
        sort=sort,
        fold=not no_fold,
        types=types,
        slots=slots,
        run=run,
    )
