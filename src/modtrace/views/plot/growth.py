"""Draws how the difference of two recordings grows along the depth of the model."""

from typing import TYPE_CHECKING

import numpy as np

from ...analysis.divergence.answer import Comparison
from .style import FEW_COLORS, NONFINITE_COLOR, few_of, new_axes, short_name, strip_frame

if TYPE_CHECKING:
    from matplotlib.axes import Axes

#: The largest number of places that are named below the axis.
_NAMED = 16


def plot_growth(found: Comparison, ax: "Axes | None" = None) -> "Axes":
    """Draws the relative error of each place and its noise; places without error are at the lower edge.

    Raises:
        MissingLibraryError: matplotlib is not installed.
    """
    ax = new_axes([], 4.2) if ax is None else ax
    points = found.growth
    at, errors = np.arange(len(points)), np.array([point.error for point in points], np.float64)
    known = [number for point in points for number in (point.error, point.noise) if 0 < number < np.inf]
    # A power of ten below all errors.
    lowest = float(10.0 ** (np.floor(np.log10(min(known, default=1e-8))) - 1))
    shown = np.where(np.isfinite(errors) & (errors > lowest), errors, lowest)
    ax.set_yscale("log")
    ax.plot(at, shown, color=FEW_COLORS[0], marker="o", markersize=3, label="difference")
    noise = np.maximum([point.noise for point in points], lowest)
    ax.plot(at, noise, color="#888888", linestyle="--", linewidth=1, label="noise of one op or module")
    beyond = np.flatnonzero(errors > noise)
    ax.plot(at[beyond], shown[beyond], linestyle="", marker="o", markersize=4, color=NONFINITE_COLOR)
    names = [short_name(point.name) for point in points]
    ticks = few_of(names, _NAMED)
    ax.set_xticks(
        ticks, [names[tick] for tick in ticks], rotation=60, ha="right", size="small", parse_math=False
    )
    ax.set_ylabel("relative error")
    step = f" in step {points[0].step}" if points else ""
    ax.set_title(f"difference of the two runs{step}, forward", loc="left")
    ax.legend(frameon=False, fontsize="small")
    strip_frame(ax)
    return ax
