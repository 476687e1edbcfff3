"""`modtrace ranks`: tells which ranks of a run there are, and which of them differ."""

import click

from ..analysis.ranks.overview import read_overview
from ..analysis.ranks.replicas import check_replicas
from ..analysis.ranks.waiting import read_waiting
from ..views.text.ranks import render_ranks, render_ranks_json
from .open_run import errors_of, open_chosen_ranks
from .output import print_text, print_view

EXIT_DIFFERS, EXIT_NOT_COMPARED = 1, 2


@click.command()
@click.argument("run")
@click.option("--json", "as_json", is_flag=True, help="The whole answer as JSON.")
def ranks(run: str, as_json: bool) -> int:
    """Tells which ranks the recording RUN has, how far each came, and whether they agree.

    Of a run that hung or was killed, the collective to which a rank did not come is named, with its step and module,
    and of any run the rank for which the others wait. Parameters, the gradients that the optimizer uses, and its states
    have replicas on several ranks, whole or as shards. The first that differs is named, with its step and rank. The
    exit code is 1 if one differs or a rank did not come, 2 if of several ranks no two were measured, and 0 otherwise.
    """
    found, missing = open_chosen_ranks(run)
    with errors_of(run, found[0][1]):
        overview = read_overview(found, missing)
        check = check_replicas(found) if len(found) > 1 else None
        waiting = read_waiting(found, overview)
    if as_json:
        print_text(render_ranks_json(overview, check, waiting))
    else:
        print_view(render_ranks, overview, check, waiting)
    if waiting.stalls or waiting.mismatch:
        return EXIT_DIFFERS
    if overview.world_size == 1:
        return 0
    if check is None or not check.measured:
        return EXIT_NOT_COMPARED
    return EXIT_DIFFERS if check.first or check.split_output else 0
