"""Answers the questions that users ask of a recording; `open_recording()` opens one from disk."""

import os
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from ..analysis.divergence.answer import Comparison
from ..analysis.findings.all_checks import CHECKS
from ..analysis.findings.check import RunCheck, run_checks
from ..analysis.findings.finding import Findings
from ..analysis.findings.nonfinite_values import NONFINITE, find_bad_step
from ..analysis.modules.module_tree import ModuleTree, build_module_tree
from ..analysis.ops.groups import GroupedBy
from ..analysis.ops.memory_table import MemoryTable, build_memory_table
from ..analysis.ops.op_paths import OpPaths, build_op_paths
from ..analysis.ops.op_table import OpTable, build_op_table
from ..analysis.provenance.recompute import RecomputeCheck, check_recomputes
from ..analysis.provenance.search import find_all
from ..analysis.tables.ranks import describe_ranks
from ..analysis.timeline.timeline import build_timeline
from ..analysis.values.nonfinite import NonFinite
from ..analysis.values.selection import Selection
from ..recording.options.capture import Patterns
from ..recording.options.schedule import to_step_range
from ..recording.role import OUTPUT
from ..recording.statistics.moments import holds_nonfinite, nonfinite_steps
from ..store.copy import write_recording
from ..store.reader import FolderReader, open_last_attempts
from ..views.common.columns import Color
from ..views.common.whole_file import write_pieces
from ..views.formats.perfetto import write_perfetto
from ..views.html.page import ReportFrame
from ..views.plot.draw import Kind, check_picture_name, draw, find_plotted, write_axes
from ..views.text.show_module_tree import render_module_tree
from . import answers
from .graph import graph_of
from .model_graph import ModelGraph
from .recorded_tables import RecordedTables
from .report import MAX_MB, make_report

if TYPE_CHECKING:
    from matplotlib.axes import Axes


class Recording(RecordedTables, answers.Displayed):
    """A recording: its tables, and the answers they hold. `print` and notebooks show the module tree."""

    _without = answers.TREE_WITHOUT

    def __repr__(self) -> str:
        return f"<Recording steps={self.data.table('steps').num_rows}>"

    def first_nonfinite(self) -> NonFinite | None:
        """Returns what made the first NaN or infinite values: the op where ops were recorded, else the first module.

        Returns None if there are none, or only intended ones, such as masks; `meta.marks` say whether rows are
        missing.

        Raises:
            NothingRecordedError: no tensor was measured; the message says why.
        """
        return next(self.nonfinite(), None)

    def nonfinite(self) -> Iterator[NonFinite]:
        """Yields all that made NaN or infinite values, or held them, in the order in which they came up.

        They are found step by step, on request. Of a step whose ops were not measured, it is the first module's tensor.

        Raises:
            NothingRecordedError: no tensor was measured; the message says why.
        """
        return (answers.ShownNonFinite.of(found) for found in find_all(self.data))

    def findings(
        self,
        *,
        only: Collection[str] = (),
        ignore: Collection[str] = (),
        also: Sequence[RunCheck] = (),
        thresholds: Mapping[str, float] | None = None,
    ) -> Findings:
        """Returns what is wrong with the run, worst first, and what could not be checked.

        Args:
            only: names of the checks to run; all by default.
            ignore: names of checks not to run.
            also: checks of yours, which `modtrace.check` makes of functions.
            thresholds: other limits, by check and name: `{"loss-spike.factor": 8}`.

        Raises:
            ValueError: there is no such check or threshold.
        """
        checks = (*CHECKS, *also)
        found = run_checks(self.data, checks, only=only, ignore=ignore, thresholds=thresholds)
        return answers.ShownFindings.of(found)

    def recompute_check(self) -> RecomputeCheck:
        """Returns whether the recomputes of activation checkpointing agree with their forwards, or which ops differ.

        Ops are compared where their outputs were measured, else outputs of modules; by hashes where both have one,
        else by statistics.

        Raises:
            NothingRecordedError: no call was recomputed, or nothing was measured of one.
        """
        return answers.ShownRecomputeCheck.of(check_recomputes(self.data))

    def module_tree(self, step: int | None = None, steps: Any = None) -> ModuleTree:
        """Returns the calls and times of steps by module, as medians.

        Values are those of the last of these steps, or, if neither `step` nor `steps` is given, of the first with NaN
        or infinite values that were not meant.

        Args:
            step: the number of a step that is shown alone.
            steps: `"START:STOP[:EVERY]"`, a range or a slice: the steps of which it has medians, of those that are
                alike the 50 newest. If `step` is None too, they are training steps without the first two and without
                those in which something was compiled; if there are no three, it is the last complete one.

        Raises:
            TypeError, ValueError: there are no such steps.
        """
        values_step = None
        values, sites = self.data.table("values"), self.data.table("sites")
        if (
            step is None
            and steps is None
            and (nonfinite_steps(values, sites) or holds_nonfinite(values, sites))
        ):
            values_step = find_bad_step(run_checks(self.data, (NONFINITE,)))
        tree = build_module_tree(self.data, step=step, steps=steps, values_step=values_step)
        return answers.ShownModuleTree.of(tree)

    def op_table(
        self,
        step: int | None = None,
        steps: Any = None,
        *,
        by: GroupedBy = "module",
        phase: str | None = None,
    ) -> OpTable:
        """Returns the costs of the ops of steps, in descending order. Its `recorded` is False without ops.

        Args:
            step: as for `module_tree`.
            steps: as for `module_tree`.
            by: `"module"`, `"call"` (a forward with its backward and recompute) or `"op"` (ops of one name).
            phase: forward, backward, recompute or optimizer, which leaves out all other ops; None for all.

        Raises:
            TypeError, ValueError: there are no such steps, or `by` or `phase` is something else.
        """
        return answers.ShownOpTable.of(build_op_table(self.data, step=step, steps=steps, by=by, phase=phase))

    def memory_table(self, step: int | None = None, steps: Any = None, *, ops: bool = False) -> MemoryTable:
        """Returns what the modules save for backward and their calls allocate. Its `recorded` is False without ops.

        Args:
            step: as for `module_tree`.
            steps: as for `module_tree`.
            ops: lists in each row the ops that save memory.

        Raises:
            TypeError, ValueError: there are no such steps.
        """
        return answers.ShownMemoryTable.of(build_memory_table(self.data, step=step, steps=steps, ops=ops))

    def paths(self, step: int | None = None, *, phase: str | None = None) -> OpPaths:
        """Returns the ops in the order in which they ran, each with its module. Its `recorded` is False without ops.

        Args:
            step: the number of the step; None for the last complete one.
            phase: forward, backward, recompute or optimizer, which leaves out all other ops; None for all.

        Raises:
            ValueError: there is no such step, or no such phase.
        """
        return answers.ShownOpPaths.of(build_op_paths(self.data, step=step, phase=phase))

    def graph(self, step: int | None = None) -> ModelGraph:
        """Returns the execution graph of one step. Without ops its nodes are calls, in the order in which they began.

        Args:
            step: the number of the step; None for the last complete one.

        Raises:
            ValueError: there is no such step.
        """
        return graph_of(self.data, step)

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

    def write(self, path: str | os.PathLike[str], *, overwrite: bool = False) -> None:
        """Writes the recording as a folder.

        Args:
            path: the folder.
            overwrite: replaces a recording at `path`.

        Raises:
            RecordingExistsError: `path` exists, and `overwrite` is False.
            RecordingError: it cannot be written.
        """
        write_recording(self._settled(), path, overwrite=overwrite)

    def _render(self, color: Color, top: int | None) -> str:
        return render_module_tree(self.module_tree(), color=color)


def open_recording(path: str | os.PathLike[str], *, rank: int | None = None) -> Recording:
    """Opens a recording folder, also one whose run was killed or is still running.

    Args:
        path: the folder.
        rank: of a recording of several ranks the one to open, as it ran after its last restart; None for the first.

    Raises:
        ValueError: there is no such rank.
        RecordingNotFoundError: nothing is at `path`.
        NotARecordingError: something else is at `path`.
        NewerSchemaError: a newer modtrace wrote it.
        DamagedRecordingError: a file of it cannot be understood.
    """
    if rank is None:
        return Recording(FolderReader(path))
    ranks = dict(open_last_attempts(path))
    if rank not in ranks:
        raise ValueError(f"rank={rank!r}: the recording has {describe_ranks(ranks)}")
    return Recording(ranks[rank])
