"""`modtrace show`: shows the module tree of a recording with the times and values of its steps."""

import click

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

    Values are those of the last of these steps.
    """
    data = open_with_rows(run, "calls")
    number = read_step(run, data, step)
    with errors_of(run, data, option="--step" if steps is None else None):
        tree = build_module_tree(data, step=number, steps=steps)
    if as_json:
        print_text(render_module_tree_json(tree))
        return
    print_view(
        render_module_tree, tree, depth=depth, sort=sort, fold=not no_fold, types=types, slots=slots, run=run
    )
