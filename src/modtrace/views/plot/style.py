"""Holds what plots of values share: titles, colours, scales, and figures outside of pyplot."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from ...optional import require
from ...recording.role import BY_NAME
from ...recording.statistics.known import title_of
from ...recording.statistics.moments import Numbers
from ..common.columns import Text

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.cm import ScalarMappable
    from matplotlib.colorbar import Colorbar
    from matplotlib.colors import Normalize

#: Titles of quantities in histories that are no statistics of a tensor.
_OTHERS = {"relative": "L2: update / parameter", "user": "value of your function"}

#: Colours that colour-blind readers can distinguish (M. Okabe and K. Ito, Color Universal Design, 2008), without their
#: yellow, which is hardly visible on white.
FEW_COLORS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#56B4E9", "#E69F00", "#000000")
NONFINITE_COLOR = "#C1121F"
UNMEASURED_COLOR = "#EBEBEB"
_SEQUENTIAL, _DIVERGING = "viridis", "PuOr"

#: A logarithmic scale is used if the largest magnitude is at least this many times the smallest.
_WIDE = 30

_LARGEST = 1e140

#: The width of a figure in inches, the length of names that fits into it, and the width that the figure gains for each
#: further character.
_WIDTH, _USUAL_NAME, _CHARACTER = 7.4, 24, 0.07

#: The width of the longest name in a picture.
_LONGEST_NAME = 100

Scale = Literal["linear", "log", "symlog"]


def label_of(stat: str) -> str:
    """Returns the title of a statistic."""
    return _OTHERS.get(stat) or title_of(stat)


def describe_role(role: str) -> str:
    """Returns the name of a role for many tensors."""
    known = BY_NAME.get(role)
    return known.of_many if known else role


def short_name(name: str) -> str:
    """Returns a name as a picture shows it: with control characters escaped, and without its middle if it is long."""
    return Text(name).cut(_LONGEST_NAME).render(color=False)


def new_axes(names: Sequence[str], height: float) -> "Axes":
    """Returns the axes of a new figure outside of pyplot, so that no window opens and nothing stays in memory.

    Args:
        names: the texts beside the axes; long ones make the figure wider.
        height: the height in inches.

    Raises:
        MissingLibraryError: matplotlib is not installed.
    """
    require("matplotlib", "drawing a plot")
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    longest = max(map(len, names), default=0)
    width = _WIDTH + _CHARACTER * max(0, longest - _USUAL_NAME)
    figure = Figure(figsize=(width, height), dpi=110, layout="constrained")
    FigureCanvasAgg(figure)
    return figure.add_subplot()


def add_bar(ax: "Axes", shown: "ScalarMappable", label: str = "") -> "Colorbar":
    """Adds a colour bar beside the axes, and returns it."""
    figure = ax.get_figure(root=False)
    assert figure is not None  # None only for axes without a figure, which we never make
    bar = figure.colorbar(shown, ax=ax, pad=0.02, aspect=30, label=label)
    bar.outline.set_visible(False)
    return bar


def count_steps(ax: "Axes") -> None:
    """Formats the axis of steps with whole numbers, fewer of them if they have many digits."""
    from matplotlib.ticker import MaxNLocator

    ax.set_xlabel("step")
    most = max(2, min(9, 12 - len(f"{ax.get_xlim()[1]:.0f}")))
    ax.xaxis.set_major_locator(MaxNLocator(nbins=most, integer=True, min_n_ticks=1, steps=[1, 2, 5, 10]))
    ax.xaxis.set_major_formatter("{x:.0f}")


def strip_frame(ax: "Axes") -> None:
    """Removes the frame except for the left and the lower line."""
    ax.spines[["top", "right"]].set_visible(False)


def drawable(values: Numbers) -> Numbers:
    """Returns the values, with 0 or infinity where matplotlib's log axes would overflow (3.11)."""
    magnitudes = np.abs(values)
    return np.where(magnitudes > _LARGEST, np.inf, np.where(magnitudes < 1 / _LARGEST, 0, values))


def choose_scale(values: Numbers) -> Scale:
    """Returns `log` if magnitudes differ widely, `symlog` if some of them are zero or negative, else `linear`."""
    finite = values[np.isfinite(values)]
    magnitudes = np.abs(finite[finite != 0])
    if not len(magnitudes) or float(magnitudes.max()) < _WIDE * float(magnitudes.min()):
        return "linear"
    if finite.min() > 0:
        return "log"
    if finite.min() < 0:  # a mean that crosses zero has small magnitudes, which have no meaning
        return "symlog" if magnitudes.max() > _WIDE * np.quantile(magnitudes, 0.9) else "linear"
    return "symlog"


def linear_part(values: Numbers) -> float:
    """Returns the magnitude up to which a `symlog` scale is linear."""
    finite = values[np.isfinite(values)]
    magnitudes = np.abs(finite[finite != 0])
    return float(np.median(magnitudes) if finite.min() < 0 else magnitudes.min())


def color_scale(values: Numbers) -> "tuple[str, Normalize]":
    """Returns the name of a colour map, diverging about zero for values of both signs, and the norm of the values."""
    from matplotlib import colors

    finite = values[np.isfinite(values)]
    if not len(finite):
        return _SEQUENTIAL, colors.Normalize(0, 1)
    low, high, scale = float(finite.min()), float(finite.max()), choose_scale(values)
    if low < 0 < high:
        low, high = -max(-low, high), max(-low, high)
    name = _DIVERGING if low < 0 < high else _SEQUENTIAL
    if scale == "log":
        return name, colors.LogNorm(low, high)
    if scale == "symlog":
        return name, colors.SymLogNorm(linear_part(values), vmin=low, vmax=high)
    return name, colors.Normalize(low, high)


def many_colors(count: int) -> Any:
    """Returns a colour map of `count` colours, without its palest ones, for the layers in order."""
    from matplotlib import colormaps, colors

    shades = colormaps[_SEQUENTIAL](np.linspace(0, 0.92, count))
    return colors.ListedColormap(shades, name="modtrace_layers")


def few_of(names: Sequence[str], most: int) -> list[int]:
    """Returns the indices of at most `most` names, equally spaced, beginning with the first."""
    return list(range(0, len(names), -(-len(names) // most) or 1))
