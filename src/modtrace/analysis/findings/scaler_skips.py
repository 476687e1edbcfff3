"""Finds a GradScaler that skips too many steps."""

from collections.abc import Iterator
from typing import Any

import numpy as np

from ...recording.role import GRAD_INPUT, GRAD_OUTPUT, LOSS, PARAMETER_GRAD
from ...recording.triggers.step_conditions import SKIPS_WINDOW, are_many_skipped
from ..provenance.skipped_steps import SkippedSteps
from ..tables.columns import Column, column_of, dictionary_codes
from ..tables.sampled_steps import SampledSteps
from ..tables.step_series import order_rows
from ..tables.values import PlacedValues
from .check import check
from .finding import Finding
from .needs import lacks_values
from .places import describe_site, place_of_site

#: The number of first steps in which a scaler still looks for its scale.
_BEGINNING = 2 * SKIPS_WINDOW


@check("grad-scaler", about="a GradScaler that skips too many steps", needs="values")
def GRAD_SCALER(run: SampledSteps, skips: int = 5) -> Iterator[Finding]:
    """Finds that no optimizer used the gradients of many of the last 20 training steps, because they overflowed.

    From 10 on it is an error, as for `modtrace nonfinite`. `skips` is the number from which on it is worth a warning
    once the scaler has found its scale: it tries a larger one every 2,000 steps.
    """
    steps = run.training[-SKIPS_WINDOW:]
    values = run.values(GRAD_OUTPUT, GRAD_INPUT, PARAMETER_GRAD, LOSS, steps=steps)
    if not len(values.step):
        raise lacks_values(run, "gradients", GRAD_OUTPUT, GRAD_INPUT, PARAMETER_GRAD)
    skipped, rows = _find_skipped(run, values, steps)
    is_error = are_many_skipped(len(skipped))
    if not is_error and (len(skipped) < skips or len(run.training) < _BEGINNING):
        return
    first = [int(of_step[0]) for step in skipped.tolist() if len(of_step := rows[values.step[rows] == step])]
    evidence: tuple[str, ...] = ()
    place: dict[str, Any] = {}
    if first:
        sites, counts = np.unique(values.site_id[first], return_counts=True)
        site = int(sites[np.argmax(counts)])
        place = place_of_site(run, site).fields()
        evidence = (f"first not finite: {describe_site(run, site)}, in {counts.max()} of these steps",)
    yield Finding(
        severity="error" if is_error else "warning",
        text=f"the GradScaler skipped {len(skipped)} of the last {len(steps)} steps: their gradients overflow",
        remedy="compute what overflows in float32, or use bfloat16, which needs no scaler; see modtrace nonfinite RUN "
        "(first_nonfinite())",
        evidence=evidence,
        rests_on=f"the training steps {steps[0]} to {steps[-1]}",
        step=int(skipped[0]),
        **place,
    )


def _find_skipped(run: SampledSteps, values: PlacedValues, steps: Column) -> tuple[Column, Column]:
    """Returns the steps whose gradients no optimizer used, and the rows that are not finite in order.

    Without the op of a scaler it takes gradients that are not finite, as a program may have steps without an optimizer,
    or an optimizer none of whose parameters has a gradient.
    """
    counts = [column_of(values.table, name) for name in ("nan_count", "inf_count")]
    is_bad = counts[0] + counts[1] > 0
    rows = order_rows(values, np.flatnonzero(is_bad))
    codes, notes = dictionary_codes(values.table["note"])
    # A fused optimizer is called with gradients that are still scaled, and skips the step by itself.
    is_scaled = np.array([*("GradScaler" in note for note in notes), False])[codes]
    used = values.step[values.is_of(PARAMETER_GRAD) & ~(is_bad & is_scaled)]
    skipped = np.setdiff1d(np.intersect1d(steps, values.step[rows]), used)
    of_ops = SkippedSteps(run)
    if of_ops.has_scaler:
        skipped = np.union1d(skipped, [step for step in steps.tolist() if step in of_ops]).astype(np.int64)
    return skipped, rows
