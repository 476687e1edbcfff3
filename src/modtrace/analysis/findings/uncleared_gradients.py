"""Finds optimizers that use gradients to which several steps have added."""

from collections.abc import Iterator

from ..tables.sampled_steps import SampledSteps
from .check import check
from .finding import CannotCheck, Finding
from .names import name_steps_of


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
    yield Finding(
        severity="error" if is_read else "warning",
        text=f"gradients are not cleared: in {len(uncleared)} of {len(known)} steps backwards added to old ones",
        remedy="call optimizer.zero_grad() once in each step, before the first backward or behind optimizer.step()",
        rests_on=name_steps_of(run),
        step=uncleared[0],
    )
