"""Defines the part of a recording that gives what was recorded: its description, its tables and its values."""

from collections.abc import Iterator
from typing import Any

import pyarrow as pa

from ..analysis.values.history import History, build_history
from ..analysis.values.selection import Selection
from ..analysis.values.stack import Stack, build_stack
from ..analysis.values.tensor_lookup import find_tensor, find_tensors
from ..analysis.values.value_table import build_value_table
from ..optional import require
from ..recording.meta import HELD, Note, RunMeta
from ..recording.options.capture import Patterns
from ..recording.protocols import RecordingData
from ..recording.raw_tensor import to_torch_if_there
from ..recording.role import OUTPUT


class RecordedTables:
    """The description, the tables and the measured values of a recording."""

    def __init__(self, data: RecordingData) -> None:
        self._data = data

    @property
    def data(self) -> RecordingData:
        """The tables, in the form that analyses need."""
        return self._data

    @property
    def meta(self) -> RunMeta:
        """The description of the run; its `marks` say what is missing from the recording."""
        return self.data.meta

    @property
    def triggers(self) -> tuple[Note, ...]:
        """The triggers that have fired, in order, with step, kind and reason; also exceptions and `dump()`."""
        return tuple(note for note in self.meta.notes if note.kind != HELD)

    def table(self, name: str) -> pa.Table:
        """Returns all rows of a table; docs/schema.md explains its columns.

        Raises:
            ValueError: there is no such table.
        """
        return self.data.table(name)

    def frame(self, name: str) -> Any:
        """Returns all rows of a table as a `pandas.DataFrame`; integers that may be missing are pandas' `Int64`.

        `frame("steps")` is in order of step, while the table has steps as they ended.

        `frame("values")` has more columns than the table. The first columns say where and when the tensor was seen:
        `step`, `phase`, `root`, `path`, `call` (n-th of its module in the step), `type`, `role`, `slot`, `op` and
        `op_nth`. After the raw statistics come the derived ones: `mean`, `std`, `rms`, `l2`, `abs_max`, `nonfinite`
        (the number of NaN and infinite elements), their fractions and `crest`, and, null unless `Capture(stats=2)`
        measured it, `mean_abs`, `zero_fraction`, `kurtosis` and `argmax`. `relative` is the L2 norm of an update
        divided by that of its parameter. Hashes are text, lists are arrays.

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
        if name == "values":
            return build_value_table(self.data)
        return self.table(name).sort_by("step") if name == "steps" else self.table(name)

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
        """Returns one statistic of many sites, step by step. Sites are in layer order, also those of gradients.

        Several rows of a site in a step (micro-batches, calls) are merged as if all their numbers were one tensor: the
        RMS is that of all of them, not a mean of means.

        Args:
            path: selects modules and parameters, as in `record(include=...)`; None for all.
            role: such as `output`, `grad_output`, `parameter`, `parameter_grad`, `update`.
            stat: a raw or derived statistic; `underflow:fp16` and the like; `relative` for updates; `user`, or
                `user:KEY`, for what your function returned. docs/plots.md lists them.
            slot: selects one of several tensors in a structure, such as `[0]`; None for all, each a site of its own.
            phase: forward, backward, recompute or optimizer; None for the usual one of the role.
            call: selects the n-th call of a module in each step; None for all.
            steps: `"START:STOP[:EVERY]"`, a range, a slice, a list or a function of the number; None for all.

        Raises:
            TypeError, ValueError: nothing is selected, there is no such statistic, or it was not measured.
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
        """Returns the whole tensors of many sites in one step as one array, whose first axis is the layers.

        The other arguments are as for `history`.

        Args:
            step: the number of the step; None if tensors were kept in a single step.
            slot: selects one of several tensors in a structure; None for the first.

        Raises:
            TypeError, ValueError: nothing is selected, no tensors were kept, or their shapes differ.
        """
        return build_stack(self._settled(), step, Selection(path, role, slot, phase, call))

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
        """Returns a whole tensor that was kept.

        It is a `torch.Tensor` with memory of its own, or a `RawTensor` if torch is not installed.

        Args:
            site: the path of a module, or of a parameter for roles such as "parameter"; or a `site_id`.
            step: the number of the step; None if tensors were kept in a single step.
            call: the n-th call of the module in the step; None if it was called once.
            role: such as `output`, `input`, `grad_output`, `parameter`.
            slot: selects one of several tensors in a structure, such as `[0]`; None if there is only one.
            phase: forward, backward, recompute or optimizer; None for the usual one of the role.

        Raises:
            TypeError, ValueError: no tensor or several are selected; the message lists the existing ones.
            RecordingError: the tensor was to be kept, but its file is truncated or could not be written.
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
        """Yields each whole tensor that was kept of a site, with its step. Each is read when it is requested.

        The other arguments are as for `tensor`.

        Args:
            steps: `"START:STOP[:EVERY]"`, a range, a slice or a list; None for all.

        Raises:
            TypeError, ValueError: no tensor is selected, or those of several sites are.
        """
        found = find_tensors(self._settled(), site, Selection(None, role, slot, phase, call, steps))
        return ((step, to_torch_if_there(tensor)) for step, tensor in found)

    def _settled(self) -> RecordingData:
        """Returns the data once all whole tensors are in their files."""
        return self.data
