"""The pictures of a recording: plots of values, the timeline, and the report for the browser."""

import os
from typing import TYPE_CHECKING, Any

from . import answers
from .analysis.divergence.answer import Comparison
from .analysis.timeline.timeline import build_timeline
from .analysis.values.selection import Selection
from .make_report import MAX_MB, make_report
from .recording.options.capture import Patterns
from .recording.options.step_range import to_step_range
from .recording.protocols import RecordingData
from .recording.role import OUTPUT
from .views.common.whole_file import write_pieces
from .views.formats.perfetto import write_perfetto
from .views.html.page import ReportFrame
from .views.plot.draw import Kind, check_picture_name, draw, find_plotted, write_axes

if TYPE_CHECKING:
    from matplotlib.axes import Axes


class Pictured(answers.Displayed):
    """A recording with methods that draw it or write a picture of it."""

    @property
    def data(self) -> RecordingData:
        """The tables, in the form that analyses take."""
        raise NotImplementedError

    def plot(
        self,
        path: Patterns = None,
        role: str = OUTPUT,
        stat: str = "rms",
        kind: Kind = "lines",
        *,
        step: int | None = None,
        slot: str | None = None,
        phase: str | None = None,
        call: int | None = None,
        steps: Any = None,
        ax: "Axes | None" = None,
    ) -> "Axes":
        """Draws values over steps with matplotlib.

        The other arguments are as for `history`.

        Args:
            kind: `lines`, one for each site; `heatmap`, layers by steps, without the counters of optimizers' states;
                `histogram`, the magnitudes in powers of two, of one site over steps or, with a `step`, of many sites in
                that step.
            step: the number of the step, for a histogram.
            ax: the axes to draw on; None for a new figure, which pyplot does not manage (`.figure` of the result).

        Raises:
            TypeError, ValueError: nothing is selected, there is no such statistic or kind, or it was not measured.
            MissingLibraryError: matplotlib is not installed.
        """
        selection = Selection(path, role, slot, phase, call, steps)
        return draw(find_plotted(self.data, selection, stat=stat, kind=kind, step=step), kind, ax)

    def write_plot(self, to: str | os.PathLike[str], path: Patterns = None, **how: Any) -> None:
        """Writes the plot of `plot(path, **how)` as a PNG, SVG or PDF, depending on the suffix of `to`.

        Raises:
            TypeError, ValueError: as for `plot`, or the suffix is unknown.
            ModtraceError: the file cannot be written.
        """
        check_picture_name(to)
        write_axes(self.plot(path, **how), to)

    def write_timeline(
        self,
        path: str | os.PathLike[str],
        *,
        steps: "str | range | slice | None" = None,
        ops: bool = True,
        op_flows: bool = False,
    ) -> None:
        """Writes the times of steps, calls and ops as a trace in Chrome's format, which ui.perfetto.dev shows.

        docs/timeline.md describes it.

        Args:
            path: the file. An existing one is replaced.
            steps: `"START:STOP[:EVERY]"`, a range or a slice; None for all.
            ops: shows ops inside their calls, if they were recorded.
            op_flows: draws arrows from each op to its backward too, not only from calls.

        Raises:
            ValueError: `steps` contains no step of the recording.
            ModtraceError: the file cannot be written.
        """
        timeline = build_timeline(self.data, steps=to_step_range(steps), ops=ops, op_flows=op_flows)
        write_perfetto(timeline, path)

    def write_html(
        self,
        path: str | os.PathLike[str],
        *,
        step: int | None = None,
        max_mb: float = MAX_MB,
        comparison: Comparison | None = None,
    ) -> None:
        """Writes a report for the browser: one file that loads nothing, with tables, graph, timeline and values.

        docs/view.md describes it.

        Args:
            path: the file. An existing one is replaced.
            step: the number of the step whose calls and ops are shown; None for the one in which the first NaN or
                infinite values came up, or the compared recordings part, or else the last complete one.
            max_mb: the size of the file at most, in MB. What there is no room for is left out, and the page says so.
            comparison: what `modtrace.compare` answered of this recording, as the first, and another one; the report
                then opens with where they part.

        Raises:
            ValueError: there is no such step, or `max_mb` is too small.
            ModtraceError: the file cannot be written.
        """
        write_pieces([make_report(self.data, step=step, max_mb=max_mb, comparison=comparison)], path)

    def view(
        self,
        *,
        step: int | None = None,
        max_mb: float = MAX_MB,
        comparison: Comparison | None = None,
        height: int = 720,
    ) -> ReportFrame:
        """Shows the report of `write_html` in a notebook, in a frame that can reach nothing outside of it.

        Args:
            step: as for `write_html`.
            max_mb: as for `write_html`; the notebook grows by this size.
            comparison: as for `write_html`.
            height: the height of the frame in pixels.

        Raises:
            ValueError: there is no such step, or `max_mb` is too small.
        """
        return ReportFrame(make_report(self.data, step=step, max_mb=max_mb, comparison=comparison), height)
