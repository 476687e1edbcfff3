"""`modtrace paths`: lists the ops in order, each with its module."""

import click

from ..analysis.ops.op_paths import build_op_paths
from ..recording.phase import PHASES
from ..recording.protocols import RecordingData
from ..views.text.op_paths import render_modules, render_op_paths, render_op_paths_json
from .factory import call_model, load_factory, names_model
from .open_run import SHOWN_STEP, AskedStep, errors_of, open_with_rows, read_step, require_ops_of, step_option
from .output import print_text, print_view, tell_marks


@click.command()
@click.argument("run", metavar="RUN|MODULE:FACTORY")
@step_option(SHOWN_STEP)
@click.option("--phase", type=click.Choice(PHASES), help="Only ops of this phase. Default: all.")
@click.option("--top", type=click.IntRange(min=1), help="Ops to show, from the first. Default: all.")
@click.option("--modules", is_flag=True, help="The paths of the modules alone, repeats in a row once.")
@click.option("--json", "as_json", is_flag=True, help="The same as JSON.")
def paths(
    run: str, step: AskedStep, phase: str | None, top: int | None, modules: bool, as_json: bool
) -> None:
    """Shows which op ran in which module, in the order in which they ran.

    RUN is a recording with ops. Alternatively, the model that MODULE:FACTORY makes is called once: FACTORY is a
    function of the Python module that takes no arguments and returns (model, args, kwargs).
    """
    data = _record_call(run) if names_model(run) else open_with_rows(run, "ops")
    number = read_step(run, data, step)
    with errors_of(run, data, option="--step"):
        found = build_op_paths(data, step=number, phase=phase)
        require_ops_of(data, found.step, phase)
    if as_json:
        print_text(render_op_paths_json(found, top=top))
    elif modules:
        print_text(render_modules(found))
        tell_marks(found.marks)
    else:
        print_view(render_op_paths, found, top=top)


def _record_call(text: str) -> RecordingData:
    loaded = load_factory(text)
    from ..api.record import record

    with record(loaded.model, ops=True, values=None) as recording:
        call_model(text, loaded)
    return recording.data
