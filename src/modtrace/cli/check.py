"""`modtrace check`: tells what is wrong with a run."""

import click

from ..analysis.findings.all_checks import CHECKS
from ..analysis.findings.of_ranks import check_ranks
from ..analysis.tables.ranks import mark_ranks
from ..views.text.findings import render_findings, render_findings_json
from .open_run import errors_of, open_chosen_ranks
from .output import print_text, print_view

EXIT_FOUND, EXIT_NOT_CHECKED = 1, 2


@click.command()
@click.argument("run")
@click.option("--only", multiple=True, metavar="CHECK", help="Only this check; may be given several times.")
@click.option("--ignore", multiple=True, metavar="CHECK", help="All but this check.")
@click.option(
    "--threshold",
    "thresholds",
    multiple=True,
    metavar="CHECK.NAME=NUMBER",
    help="Another limit for a check; docs/check.md lists them.",
)
@click.option("--top", type=click.IntRange(min=1), help="At most so many findings. Default: all.")
@click.option("--json", "as_json", is_flag=True, help="The whole answer as JSON.")
def check(
    run: str,
    only: tuple[str, ...],
    ignore: tuple[str, ...],
    thresholds: tuple[str, ...],
    top: int | None,
    as_json: bool,
) -> int:
    """Tells what is wrong with the recorded run RUN: each finding with its place, its numbers, and what to try.

    Worst come first. Then comes what could not be checked, and what to record for it. The exit code is 1 if an error
    was found, 2 if nothing could be checked, and 0 otherwise.
    """
    ranks, missing = open_chosen_ranks(run)
    data = ranks[0][1]
    with errors_of(run, data):
        given = dict(map(_read_threshold, thresholds))
        found = check_ranks(ranks, missing, CHECKS, only=only, ignore=ignore, thresholds=given)
    marks = data.meta.marks if len(ranks) == 1 else mark_ranks(ranks, missing)
    if as_json:
        print_text(render_findings_json(found, marks=marks))
    else:
        print_view(render_findings, found, top=top, run=run, marks=marks)
    if not found.checked:
        return EXIT_NOT_CHECKED
    return 0 if found.ok else EXIT_FOUND


def _read_threshold(text: str) -> tuple[str, float]:
    name, _, value = text.partition("=")
    try:
        return name, float(value)
    except ValueError:
        raise click.BadParameter(
            f"{text!r} is no threshold: give CHECK.NAME=NUMBER", param_hint="--threshold"
        ) from None
