"""Draws a statistic over steps, one line for each site."""

from typing import TYPE_CHECKING, Any

import numpy as np

from ...analysis.tables.columns import Rows
from ...analysis.values.history import History
from ...recording.statistics.moments import Numbers
from .style import (
    FEW_COLORS,
    NONFINITE_COLOR,
    add_bar,
    choose_scale,
    count_steps,
    describe_role,
    few_of,
    label_of,
    linear_part,
    many_colors,
    new_axes,
    strip_frame,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes

#: The largest number of lines that are labelled at their ends.
_FEW = len(FEW_COLORS)
#: The largest number of steps that are also shown as dots.
_DOTS = 40
#: The kind of steps that have a line of their own.
_EVAL = "eval"
#: The distance between labels.
_LABEL_POINTS = 11
_NAMED_ON_BAR = 8


def plot_lines(history: History, ax: "Axes | None" = None) -> "Axes":
    """Draws the lines. Steps with NaN or infinite numbers are marked at the upper edge.

    A site that was measured in training and in evaluation has a line for each. Steps of other kinds do not break a
    line, steps that were not recorded do.
    """
    ax = new_axes(history.sites, 4.2) if ax is None else ax
    is_first = not ax.has_data()
    count = len(history.sites)
    colors = FEW_COLORS[:count] if count <= _FEW else many_colors(count).colors
    for column in range(count):
        _plot_one(ax, history, column, colors[column])
    if is_first:
        scale = choose_scale(history.values)
        ax.set_yscale(scale, **({"linthresh": linear_part(history.values)} if scale == "symlog" else {}))
        ax.set_ylabel(label_of(history.stat))
        told = " (dotted: evaluation)" if _has_both(history) else ""
        ax.set_title(f"{describe_role(history.role)}{told}", loc="left")
        strip_frame(ax)
        count_steps(ax)
    _cross(ax, history, colors)
    if count <= _FEW:
        _label(ax, history, colors)
    else:
        _name_on_bar(ax, history)
    return ax


def _plot_one(ax: "Axes", history: History, column: int, color: Any) -> None:
    kinds = np.array(history.kinds, str)
    is_evaluation, is_shown = kinds == _EVAL, history.measured[:, column]
    groups = (~is_evaluation, is_evaluation) if _has_both(history) else (np.ones(len(kinds), bool),)
    few = int(is_shown.sum()) <= _DOTS
    for number, rows in enumerate(rows for rows in groups if (rows & is_shown).any()):
        is_dotted = rows is groups[-1] and len(groups) > 1
        steps, values = _with_gaps(history, np.flatnonzero(rows & is_shown), column)
        ax.plot(
            steps,
            values,
            color=color,
            linestyle=":" if is_dotted else "-",
            marker="o" if few or _has_lonely(values) else "",
            markerfacecolor="none" if is_dotted else color,
            markersize=3 if few else 1.5,
            linewidth=1.5 if len(history.sites) <= _FEW else 1,
            label="_nolegend_" if number else history.sites[column],
        )


def _has_both(history: History) -> bool:
    """Returns whether the steps of a history are some of training, and some of evaluation."""
    return _EVAL in history.kinds and {*history.kinds} != {_EVAL}


def _with_gaps(history: History, rows: Rows, column: int) -> tuple[Numbers, Numbers]:
    """Returns the points of a line, with NaN at gaps: at non-finite values and left-out steps."""
    steps, values = history.steps[rows], history.values[rows, column]
    values = np.where(np.isfinite(values), values, np.nan)
    apart = np.diff(steps - history.others_before[rows])
    gaps = np.flatnonzero(apart > 1.5 * np.median(apart)) + 1 if len(apart) else np.empty(0, np.int64)
    return np.insert(steps.astype(np.float64), gaps, np.nan), np.insert(values, gaps, np.nan)


def _has_lonely(values: Numbers) -> bool:
    """Returns whether a value has no neighbour to which a line could lead."""
    known = np.pad(np.isfinite(values), 1)
    return bool((known[1:-1] & ~known[:-2] & ~known[2:]).any())


def _cross(ax: "Axes", history: History, colors: Any) -> None:
    bad = history.measured & (history.nonfinite | np.isinf(history.values))
    for nth, column in enumerate(np.flatnonzero(bad.any(axis=0)).tolist()):
        steps = history.steps[bad[:, column]]
        # Each line has its own row of marks, if there is space.
        height = 0.985 - (0.03 * nth if len(history.sites) <= _FEW else 0)
        ax.plot(
            steps,
            np.full(len(steps), height),
            linestyle="",
            marker="x",
            color=colors[column],
            markersize=5,
            transform=ax.get_xaxis_transform(),
            clip_on=False,
        )
    if bad.any():
        first = int(history.steps[bad.any(axis=1)][0])
        ax.set_title(
            f"× NaN or infinite, first in step {first}", loc="right", color=NONFINITE_COLOR, size="small"
        )


# Names of lines.


def _label(ax: "Axes", history: History, colors: Any) -> None:
    """Writes each name behind the end of its line, or as near as other names allow."""
    ends = [_end_of(ax, history.values[:, column]) for column in range(len(history.sites))]
    for column, height in enumerate(_move_apart(ends, _label_gap(ax))):
        ax.annotate(
            history.sites[column],
            (1, height),
            xycoords="axes fraction",
            xytext=(6, 0),
            textcoords="offset points",
            color=colors[column],
            va="center",
            size="small",
            annotation_clip=False,
            parse_math=False,  # names may contain dollar signs
        )


def _label_gap(ax: "Axes") -> float:
    """Returns the distance of labels, as a fraction of the height of the axes."""
    figure = ax.get_figure(root=True)
    dpi = 72.0 if figure is None else figure.dpi
    return float(_LABEL_POINTS * dpi / 72 / max(ax.get_window_extent().height, 1))


def _end_of(ax: "Axes", values: Numbers) -> float:
    """Returns the height of a line's end, as a fraction of the height of the axes; 1 if it has no finite value."""
    finite = values[np.isfinite(values)]
    if not len(finite):
        return 1.0
    x, y = ax.transData.transform((ax.get_xlim()[0], finite[-1]))
    return float(np.clip(ax.transAxes.inverted().transform((x, y))[1], 0, 1))


def _move_apart(heights: list[float], gap: float) -> list[float]:
    """Moves heights apart as little as needed. Names that would overlap are centred around their common middle."""
    order = np.argsort(heights, kind="stable").tolist()
    piles: list[list[int]] = []
    middles: list[float] = []
    for number in order:
        pile, middle = [number], heights[number]
        while piles and middle - middles[-1] < gap * (len(pile) + len(piles[-1])) / 2:
            pile = [*piles.pop(), *pile]
            middles.pop()
            middle = _middle_of(pile, heights, gap)
        piles.append(pile)
        middles.append(middle)
    apart = [0.0] * len(heights)
    for pile, middle in zip(piles, middles, strict=True):
        for at, label in enumerate(pile):
            apart[label] = middle + gap * (at - (len(pile) - 1) / 2)
    return apart


def _middle_of(pile: list[int], heights: list[float], gap: float) -> float:
    """Returns the middle of a pile of names, so that it is inside the axes."""
    half = gap * (len(pile) - 1) / 2
    return float(np.clip(np.mean([heights[line] for line in pile]), half, max(half, 1 - half)))


def _name_on_bar(ax: "Axes", history: History) -> None:
    """Adds a colour bar that names some of the lines, from the first layer to the last."""
    from matplotlib.cm import ScalarMappable
    from matplotlib.colors import Normalize

    count = len(history.sites)
    shown = ScalarMappable(Normalize(-0.5, count - 0.5), many_colors(count))
    bar = add_bar(ax, shown, "site, in the order of the model")
    ticks = few_of(history.sites, _NAMED_ON_BAR)
    bar.set_ticks(ticks, labels=[history.sites[at] for at in ticks], size="small", parse_math=False)
    bar.ax.invert_yaxis()
