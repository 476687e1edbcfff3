"""Finds parameters whose gradient is exactly 0 in every step."""

from collections.abc import Iterator

import numpy as np

from ...recording.role import GRAD_OUTPUT, PARAMETER_GRAD
from ...recording.suggestions import count_of
from ..tables.sampled_steps import MOST_STEPS, SampledSteps
from ..tables.step_series import arrange_series
from .check import check
from .finding import Finding
from .names import list_others
from .needs import lacks_values, require_steps
from .places import place_of_site


@check("zero-gradients", about="parameters whose gradient is exactly 0 in every step", needs="values")
def ZERO_GRADIENTS(run: SampledSteps, steps: int = 5) -> Iterator[Finding]:
    """Finds parameters that no step changes, although each gives them a gradient.

    `steps` is the smallest number of steps that count: LoRA's first matrix has a gradient of 0 in the first one.
    """
    # Steps of all kinds count, because a step that trains another head gives this one zeros.
    newest = run.training[-MOST_STEPS:]
    series = arrange_series(run.values(PARAMETER_GRAD, steps=newest))
    measured = series.is_measured.sum(axis=1)
    if not len(measured):
        raise lacks_values(run, "gradients of parameters", PARAMETER_GRAD)
    require_steps(int(measured.max()), steps, "", " with gradients")
    zero = np.flatnonzero((measured >= steps) & (series.is_zero.sum(axis=1) == measured))
    if not len(zero):
        return
    names = [place_of_site(run, int(series.site_id[row])).name for row in zero.tolist()]
    count, first = int(measured[zero].max()), place_of_site(run, int(series.site_id[zero[0]]))
    is_all = len(zero) == len(measured)
    # A critic's last bias cancels in the difference of two scores, while the weight beside it learns.
    owners = {run.sites[site].module_id for site in np.delete(series.site_id, zero).tolist()}
    is_beside = all(run.sites[site].module_id in owners for site in series.site_id[zero].tolist())
    if is_all and len(zero) > 1:
        text = f"all {len(zero)} gradients of parameters are exactly 0 in all {count_of(count, 'step')}: {names[0]}, …"
    elif len(zero) == 1:
        text = f"the gradient of {first.name} is exactly 0 in all {count_of(count, 'step')}"
    else:
        text = f"{len(zero)} parameters have a gradient of exactly 0 in all {count_of(count, 'step')}: {names[0]}, …"
    yield Finding(
        severity="error" if is_all else "note" if is_beside else "warning",
        text=text,
        remedy=(
            "see what the loss computes of their outputs: a factor of 0, units that are dead or saturated, an input "
            "that does not matter; freeze them if it is meant"
        ),
        evidence=(*list_others(names), *_find_where(run, newest)),
        rests_on=f"{count_of(count, 'step')} up to {series.steps[-1]}",
        step=int(series.steps[0]),
        **first.fields(),
    )


def _find_where(run: SampledSteps, steps: np.ndarray) -> Iterator[str]:
    """Yields where the gradients on their way back through the model become 0."""
    series = arrange_series(run.values(GRAD_OUTPUT, steps=steps))
    is_zero = series.is_zero.any(axis=1) & (series.is_zero.sum(axis=1) == series.is_measured.sum(axis=1))
    if not is_zero.any():
        return
    first = int(np.flatnonzero(is_zero)[0])
    name = place_of_site(run, int(series.site_id[first])).name
    before = place_of_site(run, int(series.site_id[first - 1])).name if first else None
    yield f"on their way back, gradients are 0 from {name} on" + (f", and not at {before}" if before else "")
