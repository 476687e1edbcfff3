"""Finds numbers in float16 that are near the largest it has, and gradients that are near the smallest."""

from collections.abc import Iterator

import numpy as np

from ...recording.role import GRAD_OUTPUT, OUTPUT, PARAMETER_GRAD
from ...recording.suggestions import first_few
from ..tables.columns import Column
from ..tables.sampled_steps import SampledSteps
from ..tables.step_series import StepSeries, arrange_series
from .check import check
from .finding import Finding
from .names import name_steps_of
from .needs import lacks_values
from .places import place_of_site

#: The largest number of float16. A mask holds its negative.
_LARGEST = 65504.0

_FLOAT16, _SHOWN = "float16", 3


@check(
    "float16-range",
    about="values in float16 near its largest number, and gradients that underflow",
    needs="values",
)
def FLOAT16_RANGE(run: SampledSteps, share: float = 0.5, rms: float = 2.0**-20) -> Iterator[Finding]:
    """Finds outputs in float16 with an element above the part `share` of its largest number, and small gradients.

    A gradient is small if its median RMS is below `rms`: float16 has no number below 2^-24, and few below 2^-20. Large
    gradients are no finding, as a GradScaler scales them until they overflow.
    """
    outputs, gradients = (
        arrange_series(run.values(*roles)) for roles in ((OUTPUT,), (GRAD_OUTPUT, PARAMETER_GRAD))
    )
    if not len(outputs.site_id) and not len(gradients.site_id):
        raise lacks_values(run, "outputs or gradients", OUTPUT, GRAD_OUTPUT, PARAMETER_GRAD)
    largest = np.where(outputs.stats.abs_max < _LARGEST, outputs.stats.abs_max, 0).max(axis=1, initial=0)
    near = np.flatnonzero(_are_float16(outputs) & (largest > share * _LARGEST))
    if len(near):
        row = near[np.argmax(largest[near])]
        place = place_of_site(run, int(outputs.site_id[row]))
        yield Finding(
            severity="warning",
            text=f"{place.name} returns {largest[row]:,.0f} in float16, whose largest number is 65,504{_more(near)}",
            remedy="use bfloat16, compute this module in float32, or scale what it is given",
            evidence=_names(run, outputs, near),
            rests_on=name_steps_of(run),
            step=int(outputs.steps[np.nanargmax(outputs.stats.abs_max[row])]),
            **place.fields(),
        )
    usual = gradients.median(gradients.stats.rms)
    small = np.flatnonzero(_are_float16(gradients) & (usual > 0) & (usual < rms))
    if len(small):
        row = small[np.argmin(usual[small])]
        place = place_of_site(run, int(gradients.site_id[row]))
        yield Finding(
            severity="warning",
            text=f"gradients underflow in float16: RMS {usual[row]:.1e} at {place.name}{_more(small)}",
            remedy="scale the loss (torch.amp.GradScaler), or use bfloat16",
            evidence=(*_names(run, gradients, small), "float16 has no number below 6.0e-08"),
            rests_on=name_steps_of(run),
            **place.fields(),
        )


def _are_float16(series: StepSeries) -> Column:
    return np.array([dtype == _FLOAT16 for dtype in series.dtypes], bool)


def _more(rows: Column) -> str:
    return f", and {len(rows) - 1} more" if len(rows) > 1 else ""


def _names(run: SampledSteps, series: StepSeries, rows: Column) -> tuple[str, ...]:
    names = [place_of_site(run, site).name for site in series.site_id[rows].tolist()]
    return (f"in all: {first_few(names, _SHOWN)}",) if len(names) > 1 else ()
