"""Finds parameters that updates leave as they are: of low precision, and others."""

from collections.abc import Iterator

import numpy as np

from ...recording.role import PARAMETER, PARAMETER_GRAD
from ...recording.suggestions import count_of
from ..tables.columns import Bools, Rows, find_rows
from ..tables.sampled_steps import SampledSteps
from ..tables.step_series import StepSeries, arrange_series
from .check import check
from .finding import Finding
from .names import list_others
from .needs import lacks_values, require_steps
from .places import place_of_site

#: Formats in which updates round to nothing, and the part of a weight below which an update surely does.
_PRECISION = {"bfloat16": "1/512", "float16": "1/4096"}


@check(
    "rounded-updates", about="weights that stay the same, though their gradients are not 0", needs="values"
)
def ROUNDED_UPDATES(run: SampledSteps, steps: int = 5) -> Iterator[Finding]:
    """Finds parameters that stay the same over all steps, although their gradient is not 0.

    A parameter stays the same if its minimum, its maximum, its sum and its sum of squares do. `steps` is the smallest
    number of steps that count.
    """
    parameters = arrange_series(run.values(PARAMETER))
    gradients = arrange_series(run.values(PARAMETER_GRAD))
    if not len(parameters.site_id) or not len(gradients.site_id):
        roles = PARAMETER if not len(parameters.site_id) else PARAMETER_GRAD
        raise lacks_values(run, "parameters" if roles == PARAMETER else "gradients of parameters", roles)
    is_low = np.array([dtype in _PRECISION for dtype in parameters.dtypes])
    measured = parameters.is_measured.sum(axis=1)
    require_steps(int(measured.max()), steps)
    is_same = _are_same(parameters)
    has_gradient = _have_gradient(run, parameters, gradients)
    is_stuck = is_same & has_gradient & (measured >= steps)
    is_judged = np.array([not str(name).startswith("LBFGS") for name, _ in _read_groups(run, parameters)])
    # LBFGS steps without a change once it has converged.
    stuck_high = np.flatnonzero(is_stuck & ~is_low & is_judged)
    yield from _find_unchanged(run, parameters, stuck_high, measured)
    stuck = np.flatnonzero(is_stuck & is_low)
    if not len(stuck):
        return
    names = [place_of_site(run, int(site)).name for site in parameters.site_id[stuck].tolist()]
    first = place_of_site(run, int(parameters.site_id[stuck[0]]))
    groups = _read_groups(run, parameters)
    moving = {groups[row] for row in np.flatnonzero(~is_same & (measured > 1)).tolist()}
    does_learn = np.array([groups[row] in moving for row in stuck.tolist()])
    share = len(stuck) / np.count_nonzero(is_low & has_gradient)
    count, dtype = int(measured[stuck].max()), parameters.dtypes[stuck[0]]
    what = f"{first.name} ({dtype}) does" if len(stuck) == 1 else f"{len(stuck)} parameters in {dtype} do"
    which = "" if len(stuck) == 1 else f": {names[0]}, …"
    why = (
        f"an update below {_PRECISION[dtype]} of its weight is rounded away"
        if does_learn.any()
        else "every parameter of the optimizer's group stays the same: its learning rate may be 0"
    )
    yield Finding(
        severity="error" if does_learn.all() and share >= 0.5 else "warning",
        text=f"{what} not change in {count_of(count, 'step')}, with gradients that are not 0{which}",
        remedy="keep weights in float32 and compute under torch.autocast, or round stochastically",
        evidence=(*list_others(names), why),
        rests_on=f"{count_of(count, 'training step')} up to {parameters.steps[-1]}",
        step=int(parameters.steps[0]),
        **first.fields(),
    )


def _find_unchanged(
    run: SampledSteps, parameters: StepSeries, stuck: Rows, measured: Rows
) -> Iterator[Finding]:
    """Yields a finding on parameters of full precision that stay the same: nothing updates them, or by 0."""
    if not len(stuck):
        return
    names = [place_of_site(run, int(site)).name for site in parameters.site_id[stuck].tolist()]
    count = int(measured[stuck].max())
    what = f"{names[0]} does" if len(stuck) == 1 else f"{len(stuck)} parameters ({names[0]}, …) do"
    yield Finding(
        severity="warning",
        text=f"{what} not change in {count_of(count, 'step')}, though the optimizer steps and gradients are not 0",
        remedy="look at the learning rate of their group (0?), and whether the optimizer runs compiled",
        evidence=list_others(names),
        rests_on=f"{count_of(count, 'training step')} up to {parameters.steps[-1]}",
        step=int(parameters.steps[0]),
        **place_of_site(run, int(parameters.site_id[stuck[0]])).fields(),
    )


def _are_same(parameters: StepSeries) -> Bools:
    """Returns which parameters have the same statistics in all steps."""
    stats = parameters.stats
    same = np.ones(len(parameters.site_id), bool)
    for numbers in (stats.min, stats.max, stats.sum, stats.sumsq):
        is_known = parameters.is_measured & ~np.isnan(numbers)
        least, largest = (np.where(is_known, numbers, end) for end in (np.inf, -np.inf))
        same &= least.min(axis=1) == largest.max(axis=1)
    return same


def _have_gradient(run: SampledSteps, parameters: StepSeries, gradients: StepSeries) -> Bools:
    """Returns which parameters have a gradient that is finite and not 0 in every step in which they were measured."""
    column = find_rows(parameters.steps, gradients.steps)
    rms = np.zeros(parameters.stats.sum.shape)
    rows = {
        (run.sites[site].module_id, run.sites[site].slot): row
        for row, site in enumerate(gradients.site_id.tolist())
    }
    for row, site in enumerate(parameters.site_id.tolist()):
        of_gradient = rows.get((run.sites[site].module_id, run.sites[site].slot))
        if of_gradient is not None:
            rms[row, column[column >= 0]] = gradients.stats.rms[of_gradient][column >= 0]
    return np.asarray(((np.isfinite(rms) & (rms > 0)) | ~parameters.is_measured).all(axis=1))


def _read_groups(run: SampledSteps, parameters: StepSeries) -> list[tuple[str | None, int | None]]:
    """Returns the optimizer of each parameter and its group there; the same for all if that is not recorded."""
    known = {one.site_id: (one.optimizer, one.group) for one in run.parameters}
    return [known.get(site, (None, None)) for site in parameters.site_id.tolist()]
