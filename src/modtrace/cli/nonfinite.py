"""`modtrace nonfinite`: tells what made the first NaN and infinite values."""

import click

from ..analysis.provenance.answer import find_first
from ..analysis.values.nonfinite import count_measured
from ..views.text.nonfinite import render_nonfinite, render_nonfinite_json
from .output import find_terminal, print_text
from .with_ops import ask, open_with_rows

EXIT_FOUND = 1


@click.command()
@click.argument("run")
@click.option("--json", "as_json", is_flag=True, help="What was found, and how much was measured, as JSON.")
def nonfinite(run: str, as_json: bool) -> int:
    """Tells what made the first NaN or infinite values in the recording RUN, why, and where they went.

    Where ops were recorded (--ops) it names the op, else the first module whose tensors hold such values. The exit code
    is 1 if there are some, 0 if not, and 2 if nothing could be checked.
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
