"""`modtrace nonfinite`: finds the first NaN and infinite values."""

import click

from ..analysis.provenance.search import find_first
from ..analysis.values.nonfinite import count_measured
from ..views.text.nonfinite import render_nonfinite, render_nonfinite_json
from .output import find_terminal, print_text
from .with_ops import ask, open_with_rows

EXIT_FOUND = 1


@click.command()
@click.argument("run")
@click.option("--json", "as_json", is_flag=True, help="What was found, and how much was measured, as JSON.")
def nonfinite(run: str, as_json: bool) -> int:
    """Finds the first tensor of the recording RUN that holds NaN or infinite values.

    Tensors are ordered by step, and within a step in the order of measuring. The exit code is 1 if there is one, 0 if
    not, and 2 if nothing was measured.
    """
    data = open_with_rows(run)
    found = ask(run, data, lambda: find_first(data))
    measured, meta = count_measured(data), data.meta
    if as_json:
        print_text(render_nonfinite_json(found, measured, marks=meta.marks))
    else:
        terminal = find_terminal()
        print_text(
            render_nonfinite(
                found,
                measured,
                marks=meta.marks,
                notes=meta.notes,
                width=terminal.width,
                color=terminal.color,
            )
        )
    return 0 if found is None else EXIT_FOUND
