"""Draws a statistic as colours: a row for each site, a column for each step."""

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from ...analysis.values.history import History
from ...analysis.values.selection import state_of
from ...recording.role import OPTIMIZER_STATE
from ...recording.statistics.moments import Numbers
from .style import (
    NONFINITE_COLOR,
    UNMEASURED_COLOR,
    add_bar,
    color_scale,
    count_steps,
    describe_role,
    few_of,
    label_of,
    new_axes,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_MOST_NAMES = 40

#: The look of cells with NaN or infinite numbers.
_BAD: dict[str, Any] = {"facecolor": "white", "edgecolor": NONFINITE_COLOR, "hatch": "xxxxx", "linewidth": 0}


def plot_heatmap(history: History, ax: "Axes | None" = None) -> "Axes":
    """Draws the map, the first layer on top. Cells with NaN or infinite numbers are hatched, unmeasured ones grey.

    The rows of optimizer states are grouped by state.
    """
    history = _by_state(history) if history.role == OPTIMIZER_STATE else history
    count = len(history.sites)
    ax = new_axes(history.sites, float(np.clip(0.21 * count + 1.3, 2.6, 10))) if ax is None else ax
    bad = history.measured & (history.nonfinite | ~np.isfinite(history.values))
    colors, norm = color_scale(history.values[history.measured & ~bad])
    edges, columns = cells_of(history.steps)
    is_empty = (~history.measured | bad)[columns] | (columns < 0)[:, None]
    shown = np.ma.masked_where(is_empty, history.values[columns]).T
    ax.set_facecolor(UNMEASURED_COLOR)
    mesh = ax.pcolormesh(
        edges, np.arange(count + 1) - 0.5, shown, cmap=colors, norm=norm, rasterized=True, shading="flat"
    )
    hatch_cells(ax, (bad[columns] & (columns >= 0)[:, None]).T, edges)
    ax.set(ylim=(count - 0.5, -0.5), xlim=(edges[0], edges[-1]))
    ax.set_title(describe_role(history.role), loc="left")
    count_steps(ax)
    name_rows(ax, history.sites)
    add_bar(ax, mesh, label_of(history.stat))
    explain_cells(
        ax, bad=bool(bad.any()), unmeasured=bool((is_empty & ~bad[columns]).any() or (columns < 0).any())
    )
    return ax


def _by_state(history: History) -> History:
    """Orders the sites by state, then by parameter: the first state of all parameters, then the second."""
    states = [state_of(site) for site in history.sites]
    order = sorted(range(len(states)), key=lambda at: states.index(states[at]))
    return replace(
        history,
        sites=tuple(history.sites[at] for at in order),
        values=history.values[:, order],
        measured=history.measured[:, order],
        nonfinite=history.nonfinite[:, order],
    )


def cells_of(steps: npt.NDArray[np.int64]) -> tuple[Numbers, npt.NDArray[np.int64]]:
    """Returns the columns of a map over steps: their edges, and the index of each column's step.

    A column is as wide as the smallest distance of two steps; wider gaps are filled by columns with the index -1.
    """
    distinct = np.unique(steps)
    half = float(np.diff(distinct).min()) / 2 if len(distinct) > 1 else 0.5
    left, right = distinct - half, distinct + half
    has_gap = np.append(left[1:] > right[:-1], False)
    edges = np.concatenate([left, right[has_gap], right[-1:]])
    columns = np.concatenate([np.arange(len(distinct)), np.full(np.count_nonzero(has_gap), -1)])
    order = np.argsort(edges[:-1], kind="stable")
    return np.append(edges[:-1][order], edges[-1]), columns[order]


def hatch_cells(ax: "Axes", bad: npt.NDArray[np.bool_], edges: Numbers) -> None:
    """Hatches cells, drawing adjacent cells of a row as one piece."""
    for row in np.flatnonzero(bad.any(axis=1)).tolist():
        change = np.flatnonzero(np.diff(np.pad(bad[row].astype(np.int8), 1)))
        pieces = [
            (edges[start], edges[end] - edges[start])
            for start, end in zip(change[::2], change[1::2], strict=True)
        ]
        ax.broken_barh(pieces, (row - 0.5, 1), **_BAD)


def name_rows(ax: "Axes", names: tuple[str, ...]) -> None:
    """Labels the rows, or as many of them as are legible."""
    shown = few_of(names, _MOST_NAMES)
    ax.set_yticks(
        shown,
        labels=[names[at] for at in shown],
        size="small" if len(shown) <= 20 else "x-small",
        parse_math=False,
    )
    ax.tick_params(axis="y", length=0)
    ax.spines[:].set_visible(False)


def explain_cells(ax: "Axes", *, bad: bool, unmeasured: bool) -> None:
    """Explains above the axes the meaning of cells without a colour."""
    from matplotlib.patches import Patch

    handles = []
    if bad:
        handles.append(Patch(label="NaN or infinite", **_BAD))
    if unmeasured:
        handles.append(Patch(facecolor=UNMEASURED_COLOR, label="not measured"))
    if handles:
        ax.legend(
            handles=handles,
            loc="lower right",
            bbox_to_anchor=(1, 1),
            ncol=2,
            frameon=False,
            fontsize="small",
            borderaxespad=0.2,
        )
