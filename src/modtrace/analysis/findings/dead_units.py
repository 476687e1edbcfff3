"""Finds modules that return nothing but zeros, and units that are never active."""

from collections.abc import Iterator

import numpy as np

from ...recording.role import GRAD_OUTPUT, OUTPUT
from ...recording.suggestions import count_of
from ..tables.sampled_steps import SampledSteps
from ..tables.step_series import arrange_series, largest_of_units
from ..tables.values import PlacedValues
from .check import check
from .finding import Finding
from .names import list_others
from .needs import lacks_values, require_steps
from .places import place_of_site

_REMEDY = "dead units: lower the learning rate, use a leaky activation, or look at what the module is given"


@check("dead-units", about="outputs and units that are 0 in every step", needs="values")
def DEAD_UNITS(run: SampledSteps, steps: int = 5, share: float = 0.5) -> Iterator[Finding]:
    """Finds outputs that are 0 in every step, and outputs of which the part `share` of the units is.

    Units are told apart where `Capture(stats=2)` has measured the largest magnitude of each channel. `steps` is the
    smallest number of steps that count: a branch whose last weights begin as zeros returns zeros in the first one.
    """
    values = run.values(OUTPUT)
    series = arrange_series(values)
    # A mask of zeros among the outputs gets no gradient.
    reached = {_call_of(run, site) for site in np.unique(run.values(GRAD_OUTPUT).site_id).tolist()}
    has_gradient = [not reached or _call_of(run, site) in reached for site in series.site_id.tolist()]
    measured = series.is_measured.sum(axis=1)
    if not len(measured):
        raise lacks_values(run, "outputs of modules", OUTPUT)
    require_steps(int(measured.max()), steps)
    is_float = np.array(["float" in dtype for dtype in series.dtypes])
    is_dead = is_float & (measured >= steps) & (series.is_zero.sum(axis=1) == measured)
    is_dead &= (series.stats.count.max(axis=1) > 1) & has_gradient
    dead = np.flatnonzero(is_dead)
    if len(dead):
        names = [place_of_site(run, int(series.site_id[row])).name for row in dead.tolist()]
        first = place_of_site(run, int(series.site_id[dead[0]]))
        count = int(measured[dead].max())
        what = f"{first.name} returns" if len(dead) == 1 else f"{len(dead)} modules return"
        which = "" if len(dead) == 1 else f": {names[0]}, …"
        yield Finding(
            severity="warning",
            text=f"{what} nothing but zeros in all {count_of(count, 'step')}{which}",
            remedy=_REMEDY,
            evidence=list_others(names),
            rests_on=f"{count_of(count, 'training step')} up to {series.steps[-1]}",
            step=int(series.steps[0]),
            **first.fields(),
        )
        return
    yield from _find_dead_units(run, values, steps, share)


def _call_of(run: SampledSteps, site_id: int) -> tuple[object, ...]:
    site = run.sites[site_id]
    return site.module_id, site.nth, site.slot


def _find_dead_units(run: SampledSteps, values: PlacedValues, steps: int, share: float) -> Iterator[Finding]:
    """Yields the output of which the largest part of the units is 0 in every step."""
    found = [
        (float(np.mean(largest == 0)), site, largest, tensors)
        for site, tensors, largest in largest_of_units(values)
        if tensors >= steps and len(largest) > 1
    ]
    worst = [one for one in found if one[0] >= share]
    if not worst:
        return
    _, site, largest, tensors = max(worst, key=lambda one: one[0])
    place = place_of_site(run, site)
    others = f"; so it is in {count_of(len(worst) - 1, 'more output')}" if len(worst) > 1 else ""
    yield Finding(
        severity="warning",
        text=(
            f"{np.sum(largest == 0)} of {len(largest)} units of {place.name} are 0 in all "
            f"{count_of(tensors, 'tensor')}{others}"
        ),
        remedy=_REMEDY,
        rests_on=f"{count_of(len(run.numbers), 'training step')} up to {run.numbers[-1]}",
        step=int(run.numbers[0]),
        **place.fields(),
    )
