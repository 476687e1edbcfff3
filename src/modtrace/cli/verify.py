"""`modtrace verify`: proves that a recording of a model states what ran."""

from dataclasses import replace

import click

from ..views.text.verification import render_verification, render_verification_json
from .factory import call_model, load_factory
from .output import find_terminal, print_text

EXIT_FOUND = 1


@click.command()
@click.argument("factory")
@click.option(
    "--seed", type=int, default=0, show_default=True, help="Of the random order and the perturbations."
)
@click.option("--json", "as_json", is_flag=True, help="The same as JSON.")
def verify(factory: str, seed: int, as_json: bool) -> int:
    """Proves a recording of the model that FACTORY (module:function) makes.

    The function returns (model, args, kwargs). One forward and backward of the model is recorded; then every op runs
    again from what was recorded, and is compared bit by bit. The exit code is 1 if the recording does not state what
    ran.
    """
    loaded = load_factory(factory)
    from ..replay.verify import verify as prove

    try:
        found = prove(loaded.model, loaded.args, loaded.kwargs, seed=seed)
    except Exception:
        call_model(factory, loaded)  # an error of the model itself is reported as such
        raise
    found = replace(found, model=f"{factory} ({found.model})")
    text = (
        render_verification_json(found)
        if as_json
        else render_verification(found, color=find_terminal().color)
    )
    print_text(text)
    return 0 if found.ok else EXIT_FOUND
