"""What users ask of a recording: every answer, one line down; `open_recording()` gives one from disk."""

import os
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from .analysis.modules.module_tree import ModuleTree, build_module_tree
from .analysis.ops.groups import GroupedBy
from .analysis.ops.memory_table import MemoryTable, build_memory_table
from .analysis.ops.op_paths import OpPaths, build_op_paths
from .analysis.ops.op_table import OpTable, build_op_table
from .analysis.timeline.timeline import build_timeline
from .analysis.values.history import History, build_history
from .analysis.values.nonfinite import NonFinite, find_first_nonfinite
from .analysis.values.selection import Selection
from .analysis.values.stack import Stack, build_stack
from .analysis.values.tensor_lookup import find_tensor, find_tensors
from .analysis.values.value_table import build_value_table
from .answers import (
    TREE_WITHOUT,
    Displayed,
    ShownMemoryTable,
    ShownModuleTree,
    ShownNonFinite,
    ShownOpPaths,
    ShownOpTable,
    shown,
)
from .model_graph import ModelGraph, graph_of
from .optional import require
from .recording.meta import HELD, Note, RunMeta
from .recording.options.capture import Patterns
from .recording.options.step_range import to_step_range
from .recording.protocols import RecordingData
from .recording.raw_tensor import to_torch_if_there
from .recording.role import OUTPUT
from .store.copy import write_recording
from .store.reader import FolderReader
from .views.common.columns import Color
from .views.formats.perfetto import write_perfetto
from .views.plot.draw import Kind, check_picture_name, draw, find_plotted, write_axes
from .views.text.show_module_tree import render_module_tree

if TYPE_CHECKING:
    from matplotlib.axes import Axes


class Recording(Displayed):
    """A recording: its tables, and the answers they hold. `print` and notebooks show the module tree."""

    _without = TREE_WITHOUT

    def __init__(self, data: RecordingData) -> None:
        self._data = data

    @property
    def data(self) -> RecordingData:
        """Returns where the tables come from; what an analysis takes."""
        return self._data

    @property
    def meta(self) -> RunMeta:
        """Returns what is known about the run; its `marks` say what is missing from the recording."""
        return self.data.meta

    @property
    def triggers(self) -> tuple[Note, ...]:
        """Returns what has fired, in order: the step, which kind of trigger, and why; also exceptions and `dump()`."""
        return tuple(note for note in self.meta.notes if note.kind != HELD)

    def table(self, name: str) -> pa.Table:
        """Returns all rows of a table; docs/schema.md says what its columns mean.

        Raises:
            ValueError: there is no such table.
        """
        return self.data.table(name)

    def frame(self, name: str) -> Any:
        """Returns all rows of a table as a `pandas.DataFrame`; integers that may be missing are pandas' `Int64`.

        `frame("values")` has more columns than the table. In front stands where and when the tensor was seen:
        `step`, `phase`, `root`, `path`, `call` (n-th of its module in the step), `type`, `role`, `slot`, `op` and
        `op_nth`. Behind the raw statistics stands what is derived from them: `mean`, `std`, `rms`, `l2`, `abs_max`,
        `nonfinite` (the number of NaN and infinite elements), their fractions and `crest`, and, null unless
        `Capture(stats=2)` measured it, `mean_abs`, `zero_fraction`, `kurtosis` and `argmax`; of an update
        `relative`, its L2 norm divided by that of its parameter. Hashes are text, lists are arrays.

        Raises:
            ValueError: there is no such table.
            MissingLibraryError: pandas is not installed.
        """
        pandas = require("pandas", "Recording.frame()")
        nullable = {pa.int64(): pandas.Int64Dtype(), pa.int32(): pandas.Int32Dtype()}
        return self._named_table(name).to_pandas(types_mapper=nullable.get)

    def to_polars(self, name: str = "values") -> Any:
        """Returns all rows of a table as a `polars.DataFrame`, with the columns of `frame`.

        Raises:
            ValueError: there is no such table.
            MissingLibraryError: polars is not installed.
        """
        return require("polars", "Recording.to_polars()").from_arrow(self._named_table(name))

    def _named_table(self, name: str) -> pa.Table:
        return build_value_table(self.data) if name == "values" else self.table(name)

    def history(
        self,
        path: Patterns = None,
        role: str = OUTPUT,
        stat: str = "rms",
        *,
        slot: str | None = None,
        phase: str | None = None,
        call: int | None = None,
        steps: Any = None,
    ) -> History:
        """Returns one statistic of many sites, step by step; sites are in layer order, also those of gradients.

        Several rows of a site in a step (micro-batches, calls) are merged as if all their numbers had been one
        tensor: the RMS is that of all of them, not a mean of means.

        Args:
            path: which modules and parameters, as in `record(include=...)`; None for all.
            role: such as `output`, `grad_output`, `parameter`, `parameter_grad`, `update`.
            stat: a raw or derived statistic; `underflow:fp16` and the like; `relative` of updates; `user`, or
                `user:KEY`, of what your function returned. docs/plots.md lists them.
            slot: of tensors in a structure only this one, such as `[0]`; None for all, each a site of its own.
            phase: forward, backward, recompute or optimizer; None for the one that the role is about.
            call: only the n-th call of a module in each step.
            steps: `"START:STOP[:EVERY]"`, a range, a slice, a list or a function of the number; None for all.

        Raises:
            TypeError, ValueError: nothing is meant, there is no such statistic, or it was not measured.
        """
        return build_history(self.data, stat, Selection(path, role, slot, phase, call, steps))

    def stack(
        self,
        path: Patterns = None,
        step: int | None = None,
        role: str = OUTPUT,
        *,
        slot: str | None = None,
        phase: str | None = None,
        call: int | None = None,
    ) -> Stack:
        """Returns the whole tensors of many sites in one step as one array, with a layer axis in front.

        Args:
            step: its number; None where tensors of one step alone were kept.
            slot: of outputs that are structures the tensor to take; None for the first.

        Raises:
            TypeError, ValueError: nothing is meant, no tensors were kept, or their shapes differ.
        """
        return build_stack(self._settled(), step, Selection(path, role, slot, phase, call))

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
        """Draws values over steps with matplotlib; path, role, stat and the others are those of `history`.

        Args:
            kind: `lines`, one for each site; `heatmap`, layers by steps, of optimizers' states without counters;
                `histogram`, the magnitudes in powers of two of one site over steps, or, with a `step`, of many
                sites in that step.
            ax: axes to draw on; None for a figure of its own, which pyplot does not know: `.figure` of what is
                returned.

        Raises:
            TypeError, ValueError: nothing is meant, there is no such statistic or kind, or it was not measured.
            MissingLibraryError: matplotlib is not installed.
        """
        selection = Selection(path, role, slot, phase, call, steps)
        return draw(find_plotted(self.data, selection, stat=stat, kind=kind, step=step), kind, ax)

    def write_plot(self, to: str | os.PathLike[str], path: Patterns = None, **how: Any) -> None:
        """Writes what `plot(path, **how)` draws as a PNG, SVG or PDF, as the name ends.

        Raises:
            TypeError, ValueError: as for `plot`, or the name tells no format.
            ModtraceError: the file cannot be written.
        """
        check_picture_name(to)
        write_axes(self.plot(path, **how), to)

    def tensor(
        self,
        site: str | int,
        step: int | None = None,
        *,
        call: int | None = None,
        role: str = OUTPUT,
        slot: str | None = None,
        phase: str | None = None,
    ) -> Any:
        """Returns a whole tensor that was kept: a `torch.Tensor` of its own memory, or a `RawTensor` without torch.

        Args:
            site: the path of a module, or with `role="parameter"` and its like of a parameter; or a `site_id`.
            step: its number; None where tensors of one step alone were kept.
            call: n-th call of the module in the step; None where it was called once.
            role: such as `output`, `input`, `grad_output`, `parameter`.
            slot: of tensors in a structure which one, such as `[0]`; None where there is one.
            phase: forward, backward, recompute or optimizer; None for the one that the role is about.

        Raises:
            TypeError, ValueError: none is meant, or several are; the text says which there are.
            RecordingError: it was to be kept, and is not there: its file is cut, or could not be written.
        """
        return to_torch_if_there(
            find_tensor(self._settled(), site, step, Selection(None, role, slot, phase, call))
        )

    def tensors(
        self,
        site: str | int,
        *,
        call: int | None = None,
        role: str = OUTPUT,
        slot: str | None = None,
        phase: str | None = None,
        steps: Any = None,
    ) -> Iterator[tuple[int, Any]]:
        """Yields each whole tensor that was kept of a site, with its step; each is read when it is asked for.

        Args:
            steps: which, `"START:STOP[:EVERY]"`, a range, a slice or a list; None for all.

        Raises:
            TypeError, ValueError: none is meant, or those of several sites are.
        """
        found = find_tensors(self._settled(), site, Selection(None, role, slot, phase, call, steps))
        return ((step, to_torch_if_there(each)) for step, each in found)

    def first_nonfinite(self) -> NonFinite | None:
        """Returns the first tensor, by step and order of measuring, that holds NaN or infinite values.

        None where every tensor that was measured is finite; `meta.marks` say whether rows are missing.

        Raises:
            NothingRecordedError: none was measured; the text says why.
        """
        found = find_first_nonfinite(self.data)
        return None if found is None else shown(ShownNonFinite, found)

    def module_tree(self, step: int | None = None) -> ModuleTree:
        """Calls and times by module, of one step.

        Args:
            step: its number; None for the last complete one.

        Raises:
            ValueError: there is no such step.
        """
        return shown(ShownModuleTree, build_module_tree(self.data, step=step))

    def op_table(
        self, step: int | None = None, *, by: GroupedBy = "module", phase: str | None = None
    ) -> OpTable:
        """Returns what the ops of one step cost, the most expensive first; its `recorded` is False without ops.

        Args:
            step: its number; None for the last complete one.
            by: `"module"`, `"call"` (a forward with its backward and recompute) or `"op"` (ops of one name).
            phase: forward, backward, recompute or optimizer, to leave all other ops out.

        Raises:
            ValueError: there is no such step, or `by` or `phase` is something else.
        """
        return shown(ShownOpTable, build_op_table(self.data, step=step, by=by, phase=phase))

    def memory_table(self, step: int | None = None, *, ops: bool = False) -> MemoryTable:
        """Returns what the modules save for backward and their calls allocate; its `recorded` is False without ops.

        Args:
            step: its number; None for the last complete one.
            ops: whether each row says which of its ops save.

        Raises:
            ValueError: there is no such step.
        """
        return shown(ShownMemoryTable, build_memory_table(self.data, step=step, ops=ops))

    def paths(self, step: int | None = None, *, phase: str | None = None) -> OpPaths:
        """Returns which op ran in which module, in order; its `recorded` is False without ops.

        Args:
            step: its number; None for the last complete one.
            phase: forward, backward, recompute or optimizer, to leave all other ops out.

        Raises:
            ValueError: there is no such step, or no such phase.
        """
        return shown(ShownOpPaths, build_op_paths(self.data, step=step, phase=phase))

    def graph(self, step: int | None = None) -> ModelGraph:
        """Returns the execution graph of one step; without ops its nodes are calls, in the order in which they began.

        Args:
            step: its number; None for the last complete one.

        Raises:
            ValueError: there is no such step.
        """
        return graph_of(self.data, step)

    def write_timeline(
        self,
        path: str | os.PathLike[str],
        *,
        steps: "str | range | slice | None" = None,
        ops: bool = True,
        op_flows: bool = False,
    ) -> None:
        """Writes when what ran as a trace in Chrome's format, which ui.perfetto.dev shows; see docs/timeline.md.

        Args:
            path: a file; one that is there is replaced.
            steps: which, `"START:STOP[:EVERY]"`, a range or a slice; None for all.
            ops: whether ops are shown inside of their calls, where they were recorded.
            op_flows: whether arrows lead from each op to its backward too, not only from calls.

        Raises:
            ValueError: `steps` holds no step of the recording.
            ModtraceError: the file cannot be written.
        """
        timeline = build_timeline(self.data, steps=to_step_range(steps), ops=ops, op_flows=op_flows)
        write_perfetto(timeline, path)

    def write(self, path: str | os.PathLike[str], *, overwrite: bool = False) -> None:
        """Writes the recording as a folder.

        Raises:
            RecordingExistsError: something is there, and `overwrite` was not said.
            RecordingError: it cannot be written.
        """
        write_recording(self._settled(), path, overwrite=overwrite)

    def _settled(self) -> RecordingData:
        """Returns the data, with all whole tensors in their files."""
        return self.data

    def _render(self, color: Color, top: int | None) -> str:
        return render_module_tree(self.module_tree(), color=color)


def open_recording(path: str | os.PathLike[str]) -> Recording:
    """Opens a recording folder, also one whose run was killed or still runs.

    Raises:
        RecordingNotFoundError: nothing is there.
        NotARecordingError: something else is there.
        NewerSchemaError: a newer modtrace wrote it.
        DamagedRecordingError: a file of it cannot be understood.
    """
    return Recording(FolderReader(path))
