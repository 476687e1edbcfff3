"""Finds optimizers that use gradients to which several steps have added."""

from collections.abc import Iterator

import numpy as np

from ...recording.role import PARAMETER_GRAD
from ...recording.suggestions import count_of
from ..tables.columns import Column
from ..tables.placement import read_modules
from ..tables.sampled_steps import MOST_STEPS, SampledSteps
from .check import check
from .finding import CannotCheck, Finding
from .names import name_steps_of
from .places import place_of_module


@check("uncleared-gradients", about="gradients that no one clears between two steps of an optimizer")
def UNCLEARED_GRADIENTS(run: SampledSteps) -> Iterator[Finding]:
    """Finds a loop without `zero_grad()`."""
    steps = run.steps.select(["step", "uncleared"]).to_pylist()
    known = [row for row in steps if row["uncleared"] is not None]
    if not known:
        raise CannotCheck("no optimizer was seen to step twice")
    uncleared = [row["step"] for row in known if row["uncleared"]]
    if not uncleared:
        return
    # What clears gradients of a device without their version, as `gradient.data.zero_()` does, is not seen.
    is_read = run.data.meta.device.startswith("cpu")
    whose = _name_models(run, np.array(uncleared[-MOST_STEPS:]))
    which = f"{len(uncleared)} of {count_of(len(known), 'step')}"
    yield Finding(
        severity="error" if is_read else "warning",
        text=f"gradients{whose} are not cleared: in {which} backwards added to old ones",
        remedy="call optimizer.zero_grad() once in each step, before the first backward or behind optimizer.step()",
        rests_on=name_steps_of(run),
        step=uncleared[0],
    )


def _name_models(run: SampledSteps, steps: Column) -> str:
    """Returns whose parameters the optimizers of these steps update: ` of Critic`; "" for all that are trained."""
    modules = read_modules(run.data)
    roots = {one.module.root_id for one in run.parameters if one.optimizer is not None}
    updated = np.unique(run.values(PARAMETER_GRAD, steps=steps).module).tolist()
    of_steps = {modules[one].root_id for one in updated if one in modules}
    names = [place_of_module(run, root).name for root in sorted(of_steps)]
    return f" of {' and '.join(names)}" if of_steps < roots and names else ""
