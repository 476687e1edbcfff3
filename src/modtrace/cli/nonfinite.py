"""`modtrace nonfinite`: tells what made the first NaN and infinite values."""

from collections.abc import Sequence
from dataclasses import replace
from itertools import islice

import click

from ..analysis.provenance.search import find_absorbed, find_all
from ..analysis.ranks.first_nonfinite import RankAnswers, find_first_of_ranks
from ..analysis.tables.ranks import mark_ranks
from ..analysis.values.nonfinite import Measured, NonFinite, count_measured
from ..recording.protocols import RecordingData
from ..views.text.nonfinite import (
    group_alike,
    render_nonfinite,
    render_nonfinite_json,
    render_ranks_with_nonfinite,
)
from .open_run import errors_of, open_chosen_ranks
from .output import print_text, print_view

EXIT_FOUND = 1


@click.command()
@click.argument("run")
@click.option("--json", "as_json", is_flag=True, help="What was found, and how much was measured, as JSON.")
@click.option(
    "--all",
    "every",
    is_flag=True,
    help="All that made such values, or held them, and not the first alone; then those that came to nothing.",
)
@click.option(
    "--limit", type=click.IntRange(min=1), default=20, show_default=True, help="At most so many with --all."
)
def nonfinite(run: str, as_json: bool, every: bool, limit: int) -> int:
    """Tells what made the first NaN or infinite values in the recording RUN, why, and where they went.

    Of several ranks it is the one where they came up first; it may have given them to the others.

    Where ops were recorded (--ops) it names the op, else the first module whose tensors hold such values. The exit code
    is 1 if there is an answer, 0 if not, and 2 if nothing could be checked.
    """
    ranks, missing = open_chosen_ranks(run)
    of_ranks = RankAnswers([], [])
    if len(ranks) > 1:
        with errors_of(run, ranks[0][1]):
            of_ranks = find_first_of_ranks(ranks)
    searched = [(rank, data) for rank, data in ranks if rank not in of_ranks.unmeasured]
    data = dict(ranks)[of_ranks.answers[0].rank if of_ranks.answers else searched[0][0]]
    measured, meta = _count_all(searched), data.meta
    marks = meta.marks if len(ranks) == 1 else mark_ranks(ranks, missing)
    known = of_ranks.answers[0].found if of_ranks.answers else None
    if as_json:
        with errors_of(run, data):
            made = [known] if known and not every else list(islice(find_all(data), limit if every else 1))
        found = next(iter(made), None)
        others = made[1:] if every else None
        absorbed = find_absorbed(data, limit) if every else ()
        print_text(
            render_nonfinite_json(
                found,
                measured,
                marks=marks,
                further=others,
                absorbed=absorbed,
                of_ranks=of_ranks if len(ranks) > 1 else None,
            )
        )
    else:
        with errors_of(run, data):
            groups = [[known]] if known and not every else _find_groups(data, limit + 1 if every else 1)
            [first, *further] = groups or [[]]
        found = next(iter(first), None)
        if len(ranks) > 1:
            print_view(render_ranks_with_nonfinite, of_ranks, len(ranks))
        print_view(
            render_nonfinite,
            found,
            measured,
            further=[group for group in (first[1:], *further) if group],
            absorbed=find_absorbed(data, limit + 1) if every else (),
            limit=limit,
            marks=marks,
            notes=meta.notes,
        )
    return 0 if found is None else EXIT_FOUND


def _find_groups(data: RecordingData, most: int) -> list[list[NonFinite]]:
    """Returns the answers on what made NaN or infinite values, similar ones in one list, at most `most` lists."""
    found = find_all(data)
    return list(islice(group_alike(found), most)) if most > 1 else [[one] for one in islice(found, 1)]


def _count_all(ranks: Sequence[tuple[int, RecordingData]]) -> Measured:
    """Returns how much was measured on all ranks; of the other figures, those of the first."""
    counts = [count_measured(data) for _, data in ranks]
    sums = {
        name: sum(getattr(one, name) for one in counts) for name in ("tensors", "unmeasured", "nonfinite")
    }
    return replace(counts[0], **sums)
