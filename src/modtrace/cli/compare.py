"""`modtrace compare`: tells where two recordings part."""

import click

from ..analysis.divergence.compare import compare_recordings
from ..views.plot.draw import check_picture_name, draw_growth, write_axes
from ..views.text.comparison import render_comparison, render_comparison_json
from .open_run import errors_of, open_together, to_asked_step, usage_errors
from .output import print_text, print_view

EXIT_DIFFERS, EXIT_NOT_COMPARED = 1, 2


@click.command()
@click.argument("a", metavar="A")
@click.argument("b", metavar="B")
@click.option(
    "--map",
    "rules",
    multiple=True,
    metavar="EXPRESSION=PATH",
    help=r"How modules of A are called in B, such as 'model\.layers\.(\d+)=blocks.\1'. Several may be given.",
)
@click.option("--noise", "runs", multiple=True, metavar="RUN", help="A further recording of what A is of.")
@click.option("--tolerance", type=float, help="The relative error up to which runs agree.")
@click.option(
    "--step", metavar="STEP[:STEP]", help="The only step to compare; STEP:STEP if B has another number."
)
@click.option("--allow-missing", is_flag=True, help="What only A or B has does not make the exit code 1.")
@click.option("--top", type=click.IntRange(min=1), default=10, show_default=True, help="Rows of each table.")
@click.option("-o", "--output", "path", metavar="FILE", help="Draws the growth as a .png, .svg or .pdf.")
@click.option("--json", "as_json", is_flag=True, help="The whole answer as JSON.")
def compare(
    a: str,
    b: str,
    rules: tuple[str, ...],
    runs: tuple[str, ...],
    tolerance: float | None,
    step: str | None,
    allow_missing: bool,
    top: int,
    path: str | None,
    as_json: bool,
) -> int:
    """Tells where the recordings A and B part first, how the difference grows, and which op or module made it.

    The exit code is 0 if no difference is more than noise, or than --tolerance; 1 if one is, or if only one recording
    has something; and 2 if they have nothing in common, nothing was measured, or the inputs have other shapes, so that
    nothing that a model returned was compared.
    """
    if path is not None:
        with usage_errors("--output"):
            check_picture_name(path)
    first, second = open_together(a), open_together(b)
    step_a, step_b = _read_steps(step)
    with errors_of(f"{a} and {b}", first):
        found = compare_recordings(
            first,
            second,
            rules=rules,
            noise=[open_together(run) for run in runs],
            tolerance=tolerance,
            step=step_a,
            step_b=step_b,
            allow_missing=allow_missing,
        )
    if path is not None:
        write_axes(draw_growth(found), path)
    if as_json:
        print_text(render_comparison_json(found))
    else:
        print_view(render_comparison, found, top=top)
    if found.first is None and found.is_void:
        return EXIT_NOT_COMPARED
    return 0 if found.ok else EXIT_DIFFERS


def _read_steps(text: str | None) -> tuple[int | str | None, int | str | None]:
    if text is None:
        return None, None
    first, colon, second = text.partition(":")
    try:
        return to_asked_step(first), to_asked_step(second) if colon else None
    except click.BadParameter as error:
        raise click.BadParameter(f"{text!r}: {error.message}", param_hint="--step") from None
