"""Draws values over steps with matplotlib, which is loaded when it is needed."""

import io
import os
from dataclasses import replace
from pathlib import PurePath
from typing import TYPE_CHECKING, Any, Literal

from ...analysis.divergence.answer import Comparison
from ...analysis.values.exponents import Exponents, build_exponents
from ...analysis.values.history import History, build_history
from ...analysis.values.selection import Selection
from ...recording.protocols import RecordingData
from ...recording.role import OPTIMIZER_STATE
from ..common.whole_file import write_content
from .growth import plot_growth
from .heatmap import plot_heatmap
from .histogram import plot_histogram
from .lines import plot_lines
from .style import drawable, short_name

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Kind = Literal["lines", "heatmap", "histogram"]

KINDS = ("lines", "heatmap", "histogram")

#: The possible suffixes of a picture's name.
_FORMATS = (".png", ".svg", ".pdf")


def find_plotted(
    data: RecordingData, selection: Selection, *, stat: str, kind: Kind, step: int | None
) -> History | Exponents:
    """Returns the numbers of a plot; see `Recording.plot`.

    Raises:
        TypeError, ValueError: nothing is selected, there is no such statistic or kind, or it was not measured.
    """
    if kind not in KINDS:
        raise ValueError(f"kind={kind!r}: give one of {', '.join(KINDS)}")
    if kind == "histogram":
        return build_exponents(data, selection, step)
    if step is not None:
        raise ValueError(
            f"step={step!r} is for kind='histogram'. Give steps= (--steps) to choose the steps of {kind}."
        )
    if kind == "heatmap" and selection.role == OPTIMIZER_STATE and selection.slot is None:
        selection = replace(selection, counters=False)  # Adam's `step` would dominate the colours
    return build_history(data, stat, selection)


def draw(found: History | Exponents, kind: Kind, ax: "Axes | None" = None) -> "Axes":
    """Draws the result of `find_plotted`; a notebook displays the axes unless they were given.

    Raises:
        MissingLibraryError: matplotlib is not installed.
    """
    found = replace(found, sites=tuple(map(short_name, found.sites)))
    if isinstance(found, Exponents):
        drawn = plot_histogram(found, ax)
    else:
        found = replace(found, values=drawable(found.values))
        drawn = plot_heatmap(found, ax) if kind == "heatmap" else plot_lines(found, ax)
    return _displayed(drawn, ax)


def draw_growth(found: Comparison, ax: "Axes | None" = None) -> "Axes":
    """Draws how the difference of two recordings grows; a notebook displays the axes unless they were given.

    Raises:
        MissingLibraryError: matplotlib is not installed.
    """
    drawn = plot_growth(found, ax)
    return _displayed(drawn, ax)


def _displayed(drawn: "Axes", given: "Axes | None") -> "Axes":
    if given is None:
        vars(drawn)["_repr_svg_"] = lambda: picture_of(drawn, ".svg").decode()
    return drawn


def write_axes(ax: "Axes", path: str | os.PathLike[str], *, dpi: int = 110) -> None:
    """Writes the figure of the axes, in the format of the file's suffix.

    Raises:
        ModtraceError: the file cannot be written.
    """
    write_content(picture_of(ax, PurePath(path).suffix.lower(), dpi=dpi), path)


def picture_of(ax: "Axes", suffix: str, *, dpi: int = 110) -> bytes:
    """Returns the figure of the axes in the format of a suffix."""
    picture: Any = io.BytesIO()
    figure = ax.get_figure(root=True)
    assert figure is not None  # None only for axes that were removed
    undated = {"Date": None} if suffix == ".svg" else {"CreationDate": None} if suffix == ".pdf" else None
    figure.savefig(picture, format=suffix[1:], dpi=dpi, metadata=undated)
    content: bytes = picture.getvalue()
    return content


def check_picture_name(path: str | os.PathLike[str]) -> None:
    """Refuses a file name whose suffix is not a known format of pictures.

    Raises:
        ValueError: the suffix is unknown.
    """
    if PurePath(path).suffix.lower() not in _FORMATS:
        raise ValueError(f"{os.fspath(path)}: a plot's name ends in {', '.join(_FORMATS)}")
