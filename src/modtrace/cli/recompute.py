"""`modtrace recompute`: tells whether forwards and recomputes agree."""

import click

from ..analysis.provenance.recompute import check_recomputes
from ..views.text.recompute import render_recompute, render_recompute_json
from .open_run import errors_of, open_with_rows
from .output import print_text, print_view

EXIT_DIFFERS = 1


@click.command()
@click.argument("run")
@click.option("--json", "as_json", is_flag=True, help="All differences, and what was compared, as JSON.")
def recompute(run: str, as_json: bool) -> int:
    """Tells whether activation checkpointing computed the same again in the recording RUN.

    The first op that differs is named, or the first module where ops were not measured. The exit code is 1 if something
    differs, 0 if not, and 2 if nothing was recomputed or measured.
    """
    data = open_with_rows(run)
    with errors_of(run, data):
        check = check_recomputes(data)
    if as_json:
        print_text(render_recompute_json(check, marks=data.meta.marks))
    else:
        print_view(render_recompute, check, marks=data.meta.marks)
    return EXIT_DIFFERS if check.differences else 0
