"""Gives the analyses' answers a text for `print` and a table in HTML for notebooks."""

import os
from collections.abc import Collection
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

from ..analysis.divergence.answer import Comparison
from ..analysis.findings.finding import Findings
from ..analysis.modules.module_tree import ModuleTree
from ..analysis.ops.memory_table import MemoryTable
from ..analysis.ops.op_paths import OpPaths
from ..analysis.ops.op_table import OpTable
from ..analysis.provenance.recompute import RecomputeCheck
from ..analysis.values.nonfinite import NonFinite
from ..views.common.columns import Color, Text, render_lines
from ..views.html.tables import HtmlMarkup, render_page
from ..views.plot.draw import check_picture_name, draw_growth, write_axes
from ..views.text.comparison import render_comparison
from ..views.text.findings import render_findings
from ..views.text.memory_table import render_memory_table
from ..views.text.nonfinite import render_nonfinite
from ..views.text.op_paths import render_op_paths
from ..views.text.op_table import render_op_table
from ..views.text.recompute import render_recompute
from ..views.text.show_module_tree import render_module_tree

if TYPE_CHECKING:
    from matplotlib.axes import Axes

#: The number of rows that a notebook shows of a table of ops or modules.
_TOP = 50

#: Titles of columns of the module tree that only the text has.
TREE_WITHOUT = ("self", "%")


_Kind = TypeVar("_Kind", bound="Displayed")


class Displayed:
    """Something that `print` shows as text, and a notebook as HTML."""

    #: Titles of columns that only the text has, because the table would be too wide for a notebook.
    _without: ClassVar[Collection[str]] = ()

    @classmethod
    def of(cls: type[_Kind], answer: Any) -> _Kind:
        """Converts the answer of an analysis to this subclass of its class."""
        return cls(**vars(answer))

    def _render(self, color: Color, top: int | None) -> str:
        raise NotImplementedError

    def __str__(self) -> str:
        return self._render(False, None)

    def _repr_html_(self) -> str:
        return render_page(self._render(HtmlMarkup(self._without), _TOP))

    def _repr_mimebundle_(self, **_: Any) -> dict[str, str]:
        """Returns the text and the HTML. Without it a notebook would store `repr`, with all data, beside the HTML."""
        return {"text/html": self._repr_html_(), "text/plain": str(self)}


class ShownModuleTree(Displayed, ModuleTree):
    """A module tree that can be printed and displayed."""

    _without = TREE_WITHOUT

    def _render(self, color: Color, top: int | None) -> str:
        return render_module_tree(self, color=color)


class ShownOpTable(Displayed, OpTable):
    """An op table that can be printed and displayed."""

    _without = ("GFLOP/s", "written")

    def _render(self, color: Color, top: int | None) -> str:
        return render_op_table(self, top=top, color=color) + _render_missing_ops(self.recorded, color)


class ShownMemoryTable(Displayed, MemoryTable):
    """A memory table that can be printed and displayed."""

    def _render(self, color: Color, top: int | None) -> str:
        return render_memory_table(self, top=top, color=color) + _render_missing_ops(self.recorded, color)


class ShownOpPaths(Displayed, OpPaths):
    """Paths of ops that can be printed and displayed."""

    def _render(self, color: Color, top: int | None) -> str:
        return render_op_paths(self, top=top, color=color) + _render_missing_ops(self.recorded, color)


class ShownNonFinite(Displayed, NonFinite):
    """The first non-finite values, which can be printed and displayed."""

    def _render(self, color: Color, top: int | None) -> str:
        return render_nonfinite(self, color=color)


class ShownFindings(Displayed, Findings):
    """What is wrong with a run, which can be printed and displayed."""

    def _render(self, color: Color, top: int | None) -> str:
        return render_findings(self, color=color)


class ShownRecomputeCheck(Displayed, RecomputeCheck):
    """The comparison of forwards and recomputes, which can be printed and displayed."""

    def _render(self, color: Color, top: int | None) -> str:
        return render_recompute(self, color=color)


class ShownComparison(Displayed, Comparison):
    """The comparison of two runs, which can be printed, displayed and drawn."""

    def _render(self, color: Color, top: int | None) -> str:
        return render_comparison(self, top=top, color=color)

    def plot(self, ax: "Axes | None" = None) -> "Axes":
        """Draws the growth of the difference along the depth of the model with matplotlib.

        Args:
            ax: the axes to draw on; None for a new figure, which pyplot does not manage.

        Raises:
            MissingLibraryError: matplotlib is not installed.
        """
        return draw_growth(self, ax)

    def write_plot(self, to: str | os.PathLike[str]) -> None:
        """Writes the plot of `plot()` as a PNG, SVG or PDF, depending on the suffix of `to`.

        Raises:
            ValueError: the suffix is unknown.
            MissingLibraryError: matplotlib is not installed.
            ModtraceError: the file cannot be written.
        """
        check_picture_name(to)
        write_axes(self.plot(), to)


def _render_missing_ops(is_recorded: bool, color: Color) -> str:
    if is_recorded:
        return ""
    return render_lines([Text("no ops were recorded: record with ops=True", "yellow")], color=color)
