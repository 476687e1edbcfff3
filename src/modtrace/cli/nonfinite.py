"""`modtrace nonfinite`: tells what made the first NaN and infinite values."""

from itertools import islice

import click

from ..analysis.provenance.search import find_absorbed, find_all
from ..analysis.values.nonfinite import NonFinite, count_measured
from ..recording.protocols import RecordingData
from ..views.text.nonfinite import group_alike, render_nonfinite, render_nonfinite_json
from .open_run import errors_of, open_with_rows
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

    Where ops were recorded (--ops) it names the op, else the first module whose tensors hold such values. The exit code
    is 1 if there is an answer, 0 if not, and 2 if nothing could be checked.
    """
    data = open_with_rows(run)
    measured, meta = count_measured(data), data.meta
    if as_json:
        with errors_of(run, data):
            made = list(islice(find_all(data), limit if every else 1))
        found = next(iter(made), None)
        others = made[1:] if every else None
        absorbed = find_absorbed(data, limit) if every else ()
        print_text(
            render_nonfinite_json(found, measured, marks=meta.marks, further=others, absorbed=absorbed)
        )
    else:
        with errors_of(run, data):
            [first, *further] = _find_groups(data, limit + 1 if every else 1) or [[]]
        found = next(iter(first), None)
        print_view(
            render_nonfinite,
            found,
            measured,
            further=[group for group in (first[1:], *further) if group],
            absorbed=find_absorbed(data, limit + 1) if every else (),
            limit=limit,
            marks=meta.marks,
            notes=meta.notes,
        )
    return 0 if found is None else EXIT_FOUND


def _find_groups(data: RecordingData, most: int) -> list[list[NonFinite]]:
    """Returns the answers on what made NaN or infinite values, similar ones in one list, at most `most` lists."""
    found = find_all(data)
    return list(islice(group_alike(found), most)) if most > 1 else [[one] for one in islice(found, 1)]
