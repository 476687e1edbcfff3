"""Draws magnitudes in powers of two, with shares as colours, over the steps of one site or the sites of a step."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from ...analysis.values.exponents import LOWEST, Exponents
from ...recording.statistics.moments import Numbers
from ...recording.statistics.tier2 import BINS
from .heatmap import cells_of, name_rows
from .style import NONFINITE_COLOR, UNMEASURED_COLOR, add_bar, count_steps, describe_role, new_axes

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.axis import Axis

#: The height of a strip for numbers without a power of two, as a fraction of the visible powers.
_STRIP = 0.05

#: The powers of two at which a format's normal numbers begin and end.
_FORMATS = {"fp16": (-14, 16), "e4m3": (-6, 9)}

#: The ends of fp16 as bins, one of which is always visible, even if all numbers lie beyond it.
_OF_FP16 = tuple(power + 1 - LOWEST for power in _FORMATS["fp16"])

#: The space from which a name is put outside of its format, as a fraction of the visible powers.
_ROOM = 0.08

#: The height of a line of small text.
_LINE_POINTS = 9

#: A longer title takes two lines of small letters, each with space for about half as many more characters.
_LONG_TITLE = 56

#: Shares below this have the palest colour.
_LEAST = 1e-7


@dataclass(frozen=True, kw_only=True)
class _Powers:
    """The visible powers of two, with strips for numbers that have none."""

    low: int  # the first power
    shares: Numbers  # [row, power], including the strips
    edges: Numbers  # the edges of powers and strips
    zero: bool  # whether there is a strip for zeros in front
    nonfinite: bool  # whether there is a strip for non-finite numbers at the end

    @property
    def names(self) -> dict[float, str]:
        """The labels of the axis' ends, by position."""
        middle = (self.edges[1:] + self.edges[:-1]) / 2
        ends = {middle[0]: "zero"} if self.zero else {}
        return ends | ({middle[-1]: "NaN, inf"} if self.nonfinite else {})

    @property
    def bounds(self) -> tuple[float, float]:
        """The beginning and end of the powers, without the strips."""
        return float(self.edges[1 if self.zero else 0]), float(self.edges[-2 if self.nonfinite else -1])


class _End(NamedTuple):
    """The beginning or end of a format's normal numbers."""

    power: int
    name: str
    line: int  # the index of its format among the visible ones
    is_above: bool  # whether its name is on the side of larger magnitudes


def plot_histogram(found: Exponents, ax: "Axes | None" = None) -> "Axes":
    """Draws the map, with strips at its ends for the shares of zeros and of non-finite numbers."""
    powers = _powers_of(found)
    if len(set(found.sites)) > 1:
        return _plot_sites(found, powers, ax)
    return _plot_steps(found, powers, ax)


def _powers_of(found: Exponents) -> _Powers:
    used = np.flatnonzero((found.shares > 0).any(axis=0))
    low, high = (int(used[0]), int(used[-1])) if len(used) else (-LOWEST, -LOWEST)
    low, high = max(low - 1, 0), min(high + 1, BINS - 1)
    # Without the line above, a gradient that underflows fp16 as a whole would look like any other.
    low, high = min(low, _OF_FP16[1] - 1), max(high, _OF_FP16[0])
    edges = np.arange(low, high + 2, dtype=np.float64) + (LOWEST - 1)
    shares, strip = [found.shares[:, low : high + 1]], max(1.0, _STRIP * (high - low))
    zero, nonfinite = bool((found.zero > 0).any()), bool((found.nonfinite > 0).any())
    if zero:
        shares, edges = [found.zero[:, None], *shares], np.append(edges[0] - strip, edges)
    if nonfinite:
        shares, edges = [*shares, found.nonfinite[:, None]], np.append(edges, edges[-1] + strip)
    return _Powers(
        low=low + LOWEST - 1, shares=np.hstack(shares), edges=edges, zero=zero, nonfinite=nonfinite
    )


def _plot_steps(found: Exponents, powers: _Powers, ax: "Axes | None") -> "Axes":
    role, site = describe_role(found.role), found.sites[0]
    ax = new_axes([site[_LONG_TITLE:]], 4.4) if ax is None else ax
    edges, columns = cells_of(np.array(found.steps, np.int64))
    shown = np.where((columns < 0)[:, None], np.nan, powers.shares[columns])
    _draw(ax, edges, powers.edges, shown.T)
    for at in np.flatnonzero(columns < 0).tolist():
        ax.axvspan(edges[at], edges[at + 1], color=UNMEASURED_COLOR, linewidth=0)
    ax.set(ylabel="magnitude", xlim=(edges[0], edges[-1]))
    count_steps(ax)
    _draw_ticks(ax.yaxis, powers)
    _draw_lines(ax.axhline, powers)
    _name_ends_inside(ax, powers)
    if len(role) + len(site) > _LONG_TITLE:
        ax.set_title(f"{role}:\n{site}", loc="left", size="small", parse_math=False)
    else:
        ax.set_title(f"{role}: {site}", loc="left", parse_math=False)
    return ax


def _plot_sites(found: Exponents, powers: _Powers, ax: "Axes | None") -> "Axes":
    count = len(found.sites)
    ax = new_axes(found.sites, float(np.clip(0.21 * count + 1.5, 2.6, 10))) if ax is None else ax
    _draw(ax, powers.edges, np.arange(count + 1, dtype=np.float64) - 0.5, powers.shares)
    ax.set(xlabel="magnitude", ylim=(count - 0.5, -0.5))
    _draw_ticks(ax.xaxis, powers)
    _draw_lines(ax.axvline, powers)
    height = _name_ends_above(ax, powers)
    name_rows(ax, found.sites)
    ax.set_title(f"{describe_role(found.role)}, step {found.steps[0]}", loc="left", pad=6 + height)
    return ax


def _draw(ax: "Axes", x: Numbers, y: Numbers, shares: Numbers) -> None:
    from matplotlib.colors import LogNorm

    known = shares[np.isfinite(shares) & (shares > 0)]
    low, high = (max(float(known.min()), _LEAST), float(known.max())) if len(known) else (_LEAST, 1.0)
    mesh = ax.pcolormesh(
        x,
        y,
        np.ma.masked_where(~(shares > 0), shares),
        cmap="viridis_r",
        norm=LogNorm(min(low, high / 2), high),
        rasterized=True,
    )
    add_bar(ax, mesh, "share of the numbers")


def _draw_ticks(axis: "Axis", powers: _Powers) -> None:
    """Labels the axis of magnitudes."""
    first, last = map(int, powers.bounds)
    every = next(step for step in (1, 2, 4, 8, 16, 32) if (last - first) / step <= 10)
    inside = range(first + powers.zero, last + 1 - powers.nonfinite)
    ticks = {float(power): f"$2^{{{power}}}$" for power in inside if power % every == 0}
    ticks |= powers.names
    axis.set_ticks(list(ticks), labels=list(ticks.values()))
    for label, text in zip(axis.get_ticklabels(), ticks.values(), strict=True):
        if text == "NaN, inf":
            label.set_color(NONFINITE_COLOR)


def _draw_lines(draw_line: Callable[..., Any], powers: _Powers) -> None:
    """Separates the strips from the powers, and shows where formats end."""
    if powers.zero:
        draw_line(powers.edges[1], color="black", linewidth=0.8)
    if powers.nonfinite:
        draw_line(powers.edges[-2], color=NONFINITE_COLOR, linewidth=0.8)
    for end in _ends_of(powers):
        draw_line(end.power, color="white", linewidth=1.2)
        draw_line(end.power, color="black", linewidth=0.8, linestyle=(0, (4, 4)))


# The ends of formats.


def _ends_of(powers: _Powers) -> list[_End]:
    """Returns the ends of formats that are visible."""
    first, last = powers.bounds
    room = _ROOM * (last - first)
    seen: list[_End] = []
    for name, (smallest, largest) in _FORMATS.items():
        line = len({end.line for end in seen})
        if first < smallest < last:
            seen.append(_End(smallest, f"smallest normal {name}", line, smallest - first < room))
        if first < largest < last:
            seen.append(_End(largest, f"largest normal {name}", line, last - largest >= room))
    return seen


def _name_ends_inside(ax: "Axes", powers: _Powers) -> None:
    """Labels horizontal lines: the first format's on the left, the other's on the right."""
    for end in _ends_of(powers):
        ax.annotate(
            end.name,
            (0.99 if end.line else 0.01, end.power),
            xycoords=("axes fraction", "data"),
            xytext=(0, 3 if end.is_above else -3),
            textcoords="offset points",
            ha="right" if end.line else "left",
            va="bottom" if end.is_above else "top",
            size="x-small",
            bbox={"facecolor": "white", "edgecolor": "none", "alpha": 0.85, "pad": 1},
        )


def _name_ends_above(ax: "Axes", powers: _Powers) -> int:
    """Labels vertical lines above the axes, and returns the height that this takes, in points.

    Each format has a line of text.
    """
    ends = _ends_of(powers)
    for end in ends:
        ax.annotate(
            end.name,
            (end.power, 1),
            xycoords=("data", "axes fraction"),
            xytext=(0, 3 + _LINE_POINTS * end.line),
            textcoords="offset points",
            ha="left" if end.is_above else "right",
            va="bottom",
            size="x-small",
            arrowprops={
                "arrowstyle": "-",
                "linewidth": 0.8,
                "relpos": (0 if end.is_above else 1, 0),
                "shrinkA": 0,
                "shrinkB": 0,
            },
            annotation_clip=False,
        )
    return _LINE_POINTS * len({end.line for end in ends})
