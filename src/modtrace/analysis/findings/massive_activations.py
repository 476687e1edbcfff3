"""Finds outputs of which single elements are far larger than all others."""

from collections.abc import Iterator

import numpy as np

from ...recording.role import OUTPUT
from ...recording.suggestions import count_of
from ..tables.placement import read_modules
from ..tables.sampled_steps import SampledSteps
from ..tables.step_series import arrange_series
from .check import check
from .finding import Finding
from .names import name_steps_of
from .needs import lacks_values
from .places import place_of_site

#: The smallest number of elements of an output that is judged.
_LEAST = 4096

#: The smallest number of outputs of modules of the same type to compare with.
_SIBLINGS = 3


@check(
    "massive-activations", about="outputs of which one element is far larger than the others", needs="values"
)
def MASSIVE_ACTIVATIONS(run: SampledSteps, share: float = 0.25, times: float = 30) -> Iterator[Finding]:
    """Finds the output whose largest element has the part `share` of its sum of squares, in half of the steps.

    This is a crest factor of half the root of the number of elements, and more than any usual distribution has. The
    largest element must also be `times` as large as the median of the largest elements of modules of the same type: an
    output that is sparse by design, as that of a router, is so everywhere.
    """
    series = arrange_series(run.values(OUTPUT))
    if not len(series.site_id):
        raise lacks_values(run, "outputs of modules", OUTPUT)
    with np.errstate(all="ignore"):
        parts = np.square(series.stats.abs_max) / series.stats.sumsq
    part = series.median(np.where(series.stats.count >= _LEAST, parts, np.nan))
    largest = series.median(series.stats.abs_max)
    modules = read_modules(run.data)
    types = [
        getattr(modules.get(run.sites[site].module_id or 0), "type", "") for site in series.site_id.tolist()
    ]
    for row in np.flatnonzero(part >= share).tolist():
        alike = largest[[at for at, kind in enumerate(types) if kind == types[row]]]
        if len(alike) <= _SIBLINGS or not largest[row] > times * np.nanmedian(alike):
            continue
        place = place_of_site(run, int(series.site_id[row]))
        yield Finding(
            severity="note",
            text=(
                f"one element of {place.name} is {largest[row]:.3g}, with {part[row]:.0%} of its sum of squares; "
                f"{np.nanmedian(alike):.2g} is usual"
            ),
            remedy="it matters for float16 and for quantization: clip it, or normalize what the module is given",
            evidence=(
                f"usual is the median of the largest elements of {count_of(len(alike), 'output')} of {types[row]}",
            ),
            rests_on=name_steps_of(run),
            **place.fields(),
        )
        return
