"""`modtrace plot`: draws values over the steps."""

import click

from ..analysis.values.selection import Selection
from ..recording.role import OUTPUT, ROLES
from ..views.plot.draw import KINDS, Kind, check_picture_name, draw, find_plotted, write_axes
from ..views.plot.numbers_json import render_plotted_json
from .open_run import AskedStep, errors_of, open_with_rows, read_step, step_option, usage_errors
from .output import print_text, tell, tell_marks


@click.command()
@click.argument("run")
@click.argument("patterns", nargs=-1)
@click.option("-o", "--output", "path", metavar="FILE", help="A .png, .svg or .pdf.")
@click.option("--role", type=click.Choice(ROLES), default=OUTPUT, show_default=True, metavar="ROLE")
@click.option("--stat", default="rms", show_default=True, help="A statistic, such as std or abs_max.")
@click.option("--kind", type=click.Choice(KINDS), default="lines", show_default=True)
@step_option("With --kind histogram the step to show, of all sites.")
@click.option("--steps", metavar="START:STOP[:EVERY]", help="Which steps to show. Default: all.")
@click.option("--json", "as_json", is_flag=True, help="The numbers of the picture; -o is not needed then.")
def plot(
    run: str,
    patterns: tuple[str, ...],
    path: str | None,
    role: str,
    stat: str,
    kind: Kind,
    step: AskedStep,
    steps: str | None,
    as_json: bool,
) -> None:
    """Draws values of the recording RUN over its steps, for the modules and parameters that PATTERNS select.

    A pattern is a glob over paths such as 'blocks.*.attn', or re:EXPRESSION; without any, all are shown. Roles are
    output, grad_output, parameter, parameter_grad and the others of docs/vocabulary.md.
    """
    if path is None and not as_json:
        raise click.UsageError("give -o FILE for a picture, or --json for its numbers.")
    if path is not None:
        with usage_errors("--output"):
            check_picture_name(path)
    data = open_with_rows(run)
    selection = Selection(list(patterns) or None, role, steps=steps)
    number = read_step(run, data, step)
    with errors_of(run, data):
        found = find_plotted(data, selection, stat=stat, kind=kind, step=number)
    if path is not None:
        write_axes(draw(found, kind), path)
    if as_json:
        print_text(render_plotted_json(found, marks=data.meta.marks))
    elif path is not None:
        tell(f"wrote {path}\n", path)
        tell_marks(data.meta.marks)
