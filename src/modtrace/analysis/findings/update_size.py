"""Finds updates that are too large or too small for the weights that they change."""

from collections.abc import Iterator

import numpy as np

from ...recording.role import PARAMETER, UPDATE
from ...recording.suggestions import count_of
from ..tables.sampled_steps import SampledSteps
from ..tables.step_series import StepSeries, arrange_series
from .check import check
from .finding import Finding
from .names import name_steps_of
from .needs import lacks_values
from .places import place_of_site

#: The smallest number of elements of a weight that is judged: biases and norms begin with zeros or ones.
_LEAST = 256


@check(
    "update-size", about="updates too large or too small for their weights", needs="values of role `update`"
)
def UPDATE_SIZE(run: SampledSteps, most: float = 0.15, least: float = 1e-6) -> Iterator[Finding]:
    """Finds that most weights change much in each step, or hardly at all.

    The size of an update is the median of its RMS over the steps, as a part of the RMS that the weight had in the first
    of them; weights that began with zeros are left out. About 0.001 is usual; a GPT-2 of which AdamW warms up to
    0.003 begins with more than 0.1. The sizes of half of the weights must be above `most`, or below `least`.
    """
    updates, weights = (arrange_series(run.values(role)) for role in (UPDATE, PARAMETER))
    if not len(updates.site_id) or not len(weights.site_id):
        raise lacks_values(run, "updates of parameters", UPDATE)
    first = dict(zip(_owners_of(run, weights), _first_rms(weights), strict=True))
    before = np.array([first.get(owner, np.nan) for owner in _owners_of(run, updates)])
    started = arrange_series(run.values(PARAMETER, steps=run.training[:1]))
    zeros = {_owners_of(run, started)[row] for row in np.flatnonzero(started.is_zero.all(axis=1)).tolist()}
    is_weight = updates.stats.count.max(axis=1) >= _LEAST
    is_weight &= [owner not in zeros for owner in _owners_of(run, updates)]
    with np.errstate(all="ignore"):
        sizes = np.where(is_weight & (before > 0), updates.median(updates.stats.rms) / before, np.nan)
    judged = np.flatnonzero(np.isfinite(sizes))
    if not len(judged):
        return
    usual = float(np.median(sizes[judged]))
    evidence = (f"this is the median of {count_of(len(judged), 'weight')}",)
    if 2 * np.count_nonzero(sizes[judged] > most) >= len(judged):
        place = place_of_site(run, int(updates.site_id[judged[np.argmax(sizes[judged])]]))
        yield Finding(
            severity="warning",
            text=f"each step changes weights by {usual:.2g} of their size, where 0.001 is usual",
            remedy="lower the learning rate, or warm it up",
            evidence=(*evidence, f"{place.name} changes most, by {sizes[judged].max():.2g} of its size"),
            rests_on=name_steps_of(run),
            **place.fields(),
        )
    elif usual < least:
        yield Finding(
            severity="warning",
            text=f"each step changes weights by {usual:.1e} of their size, where 0.001 is usual",
            remedy="raise the learning rate; see whether a schedule or clipping makes the updates this small",
            evidence=evidence,
            rests_on=name_steps_of(run),
        )


def _owners_of(run: SampledSteps, series: StepSeries) -> list[tuple[int | None, str]]:
    """Returns the module of each site and the name of the parameter in it."""
    sites = [run.sites[site] for site in series.site_id.tolist()]
    return [(site.module_id, site.slot) for site in sites]


def _first_rms(weights: StepSeries) -> list[float]:
    """Returns the RMS of each weight in the first step in which it was measured."""
    first = np.argmax(weights.is_measured, axis=1)
    return [float(rms) for rms in weights.stats.rms[np.arange(len(first)), first]]
