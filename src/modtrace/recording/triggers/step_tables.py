"""Holds the rows of one step as a recording of its own, with all rows to which the step refers."""

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from itertools import chain

import numpy as np
import pyarrow as pa

from ..arrow.arrays import from_numpy, to_numpy
from ..arrow.batches import to_batch
from ..arrow.dictionary_codes import share_dictionaries
from ..meta import RunMeta
from ..raw_tensor import RawTensor
from ..role import PARAMETER, PARAMETER_GRAD
from ..schema import schema
from .tensor_rows import Batch, Columns, TensorRows

#: Small tables whose rows later steps refer to.
_LASTING = frozenset({"modules", "sites"})

#: The number of steps before a finding in which its report looks for growth.
GROWTH_STEPS = 20

#: The roles of tensors that grow when training diverges, and the columns that show it.
_GROWING = frozenset({PARAMETER, PARAMETER_GRAD})
_OF_GROWTH = ("step", "site_id", "order", "count", "nan_count", "inf_count", "min", "max")


class StepTables:
    """The rows of the step that is being received, and rows of earlier steps to which it may refer.

    Of `tensors` the last row of each site is kept, because a parameter or buffer has its row in the step that saw it
    first.
    """

    def __init__(self, steps_before: int = 0) -> None:
        """Creates a store without rows.

        Args:
            steps_before: for this many steps before, rows of finite parameters and gradients are kept as well, to see
                whether these have grown.
        """
        self._lasting: list[Batch] = []
        self._of_step: list[Batch] = []
        self._before: deque[list[Columns]] = deque(maxlen=steps_before)
        self._tells_growth = np.zeros(0, bool)  # indexed by site
        self._leaves = TensorRows()

    def add(self, table: str, columns: Columns) -> None:
        """Receives rows."""
        if table == "sites":
            roles = columns["role"].to_pylist()
            self._tells_growth = np.append(self._tells_growth, [role in _GROWING for role in roles])
        (self._lasting if table in _LASTING else self._of_step).append((table, columns))

    def end_step(self) -> None:
        """Drops the rows of the step, which has been received in full."""
        self._leaves.drop(-1, self._of_step)
        if self._before.maxlen:
            self._before.append(
                [
                    {name: columns[name] for name in _OF_GROWTH}
                    for table, columns in self._of_step
                    if table == "values" and "nan_count" in columns
                ]
            )
        self._of_step = []

    def _of_growth(self, columns: Columns) -> Batch:
        site, *counts = (to_numpy(columns[name], null=0) for name in ("site_id", "nan_count", "inf_count"))
        rows = from_numpy(np.flatnonzero(self._tells_growth[site] & (sum(counts) == 0)))
        return "values", {name: column.take(rows) for name, column in columns.items()}

    def read(self, more: Sequence[Batch] = ()) -> "StepData":
        """Returns the rows as a recording; `more` are rows of a step that has not ended."""
        before, leaves = list(self._before), [("tensors", columns) for columns in self._leaves.columns]
        batches = [*self._lasting, *leaves, *self._of_step, *more]
        return StepData(batches, lambda: map(self._of_growth, chain(*before)))


class StepData:
    """A `RecordingData` of one step."""

    def __init__(self, batches: Iterable[Batch], before: Callable[[], Iterable[Batch]]) -> None:
        """Holds the rows of a step; `before` returns the rows for `values_before`."""
        self.meta = RunMeta()
        self._batches = batches
        self._before = before
        self._tables: dict[str, pa.Table] = {}

    def table(self, name: str) -> pa.Table:
        """Returns the rows of a table."""
        if name not in self._tables:
            self._tables[name] = _join(name, self._batches)
        return self._tables[name]

    def values_before(self) -> pa.Table:
        """Returns the rows of `values` that are of parameters and their gradients in the steps before."""
        return _join("values", self._before())

    def with_values(self, values: pa.Table) -> "StepData":
        """Returns the same rows with another table `values`."""
        other = StepData(self._batches, self._before)
        other._tables = {**self._tables, "values": values}
        return other

    def tensor(self, blob: str) -> RawTensor:
        """Raises an error, because whole tensors are not among the rows."""
        raise NotImplementedError(blob)


def _join(name: str, batches: Iterable[Batch]) -> pa.Table:
    of_table = [to_batch(name, columns) for table, columns in batches if table == name]
    return share_dictionaries(pa.Table.from_batches(of_table, schema=schema(name)))
