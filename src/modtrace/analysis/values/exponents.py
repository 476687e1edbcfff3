"""Counts the magnitudes of tensors by powers of two, for one site over steps or for many sites in one step."""

from dataclasses import dataclass, replace
from numbers import Integral

import numpy as np

from ...recording.arrow.arrays import to_numpy
from ...recording.protocols import RecordingData
from ...recording.statistics.moments import Numbers
from ...recording.statistics.tier2 import TIER_2_COLUMNS, read_tier2
from ...recording.suggestions import first_few
from ..tables.columns import column_of
from .history_statistics import group_rows, merge_tier2_cells
from .selection import Selection, select_values

#: The bins with two bounds: bin k holds magnitudes from `2**(k - 127)`; smaller ones are in bin 0, larger in bin 255.
LOWEST = -126


@dataclass(frozen=True, kw_only=True)
class Exponents:
    """The fraction of numbers in each bin of magnitudes, with a row for each step or for each site."""

    steps: tuple[int, ...]  # the step of each row; all equal if the rows are sites
    sites: tuple[str, ...]  # the site of each row; all equal if the rows are steps
    shares: Numbers  # [row, bin], shares in all numbers: see `LOWEST`
    zero: Numbers  # the share of zeros
    nonfinite: Numbers  # the share of NaN and infinite elements
    role: str


def build_exponents(data: RecordingData, selection: Selection, step: int | None = None) -> Exponents:
    """Returns the histograms of one site over the steps, or of all selected sites in one step.

    Several rows of a site in a step are added up, which is exact.

    Raises:
        TypeError, ValueError: the selection is empty, no histograms were recorded, or several sites are selected
            without a step.
    """
    if step is not None:
        selection = replace(selection, steps=step if isinstance(step, Integral) else [step])
    selected = select_values(data, selection)
    measured = to_numpy(selected.select("histogram")["histogram"].is_valid())
    if not measured.any():
        raise ValueError(_describe_none(data, selection, "steps" if step is None else "step"))
    selected = selected.filter(measured)
    cells = group_rows(selected)
    sites = np.unique(cells.site)
    if step is None and len(sites) > 1:
        path = "no path" if selection.path is None else f"path={selection.path!r}"
        names = first_few([selected.names[site] for site in sites], 5)
        raise ValueError(
            f"{path} means {len(sites)} sites ({names}), "
            "and a histogram over steps is of one. "
            "Give its path, or step= (--step) for all of them in one step."
        )
    merged = merge_tier2_cells(read_tier2(selected.select(*TIER_2_COLUMNS)), cells)
    with np.errstate(all="ignore"):
        return Exponents(
            steps=tuple(cells.step.tolist()),
            sites=tuple(selected.names[site] for site in cells.site.tolist()),
            shares=merged.histogram[merged.histogram_row] / merged.stats.count[:, None],
            zero=merged.zero_fraction,
            nonfinite=merged.stats.nonfinite / merged.stats.count,
            role=selection.role,
        )


def _describe_none(data: RecordingData, selection: Selection, argument: str) -> str:
    """Returns the reason why there is no histogram: none was recorded, or only in other steps."""
    table = select_values(data, replace(selection, steps=None)).select("step", "histogram")
    steps = np.unique(column_of(table, "step")[to_numpy(table["histogram"].is_valid())]).tolist()
    if not steps:
        return (
            "no histograms were recorded of these tensors. "
            "Record them with Capture(stats=2) (modtrace record --capture stats=2)."
        )
    named = f"{argument}={selection.steps!r}"
    return f"{named}: no histogram was recorded there; there are some in steps {first_few(steps, 8)}"
