"""Holds the rows of one step as a recording of its own, in which an analysis finds all that the step refers to."""

from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import chain

import numpy as np
import pyarrow as pa

from ..arrow.arrays import from_numpy, last_of_each, to_numpy
from ..arrow.batches import to_batch
from ..arrow.dictionary_codes import share_dictionaries
from ..meta import RunMeta
from ..raw_tensor import RawTensor
from ..role import PARAMETER, PARAMETER_GRAD
from ..schema import schema

Columns = Mapping[str, pa.Array]

#: One batch of rows of a table.
Batch = tuple[str, Columns]

#: Small tables whose rows later steps refer to.
_LASTING = frozenset({"modules", "sites"})

#: The steps before a finding in which its report looks for growth.
GROWTH_STEPS = 20

#: The roles of tensors that grow when training diverges, and the columns that tell it.
_GROWING = frozenset({PARAMETER, PARAMETER_GRAD})
_OF_GROWTH = ("step", "site_id", "order", "count", "nan_count", "inf_count", "min", "max")


class StepTables:
    """The rows of the step that is being received, and those of earlier steps to which it may refer.

    Of `tensors` these are the last rows of each site: a parameter or a buffer has a row in the step that saw it first.
    """

    def __init__(self, steps_before: int = 0) -> None:
        """Holds nothing yet.

        Args:
            steps_before: of so many steps in front of it the finite parameters and gradients are held, too: they tell
                whether these have grown.
        """
        self._lasting: list[Batch] = []
        self._of_step: list[Batch] = []
        self._before: deque[list[Columns]] = deque(maxlen=steps_before)
        self._tells_growth = np.zeros(0, bool)  # by site
        self._leaves: pa.Table | None = None

    def add(self, table: str, columns: Columns) -> None:
        """Receives rows."""
        if table == "sites":
            roles = columns["role"].to_pylist()
            self._tells_growth = np.append(self._tells_growth, [role in _GROWING for role in roles])
        (self._lasting if table in _LASTING else self._of_step).append((table, columns))

    def end_step(self) -> None:
        """Drops the rows of the step, all of which have been received."""
        of_sites = [("tensors", _of_sites(columns)) for table, columns in self._of_step if table == "tensors"]
        if of_sites:
            tensors = _join("tensors", self._leaves, of_sites)
            rows = last_of_each(to_numpy(tensors["site_id"]))
            self._leaves = tensors.take(from_numpy(np.sort(rows)))
        if self._before.maxlen:
            measured = [each for table, each in self._of_step if table == "values" and "nan_count" in each]
            self._before.append([{name: each[name] for name in _OF_GROWTH} for each in measured])
        self._of_step = []

    def _of_growth(self, columns: Columns) -> Batch:
        site, *counts = (to_numpy(columns[name], null=0) for name in ("site_id", "nan_count", "inf_count"))
        rows = from_numpy(np.flatnonzero(self._tells_growth[site] & (sum(counts) == 0)))
        return "values", {name: each.take(rows) for name, each in columns.items()}

    def read(self, more: Sequence[Batch] = ()) -> "StepData":
        """Returns the rows as a recording; `more` are rows of a step that has not ended."""
        before = list(self._before)
        batches = [*self._lasting, *self._of_step, *more]
        return StepData(batches, self._leaves, lambda: map(self._of_growth, chain(*before)))


class StepData:
    """A `RecordingData` of one step."""

    def __init__(
        self,
        batches: Sequence[Batch],
        leaves: pa.Table | None,
        before: Callable[[], Iterable[Batch]],
    ) -> None:
        """Holds rows; `before` returns those for `values_before`."""
        self.meta = RunMeta()
        self._batches = batches
        self._before = before
        self._leaves = leaves
        self._tables: dict[str, pa.Table] = {}

    def table(self, name: str) -> pa.Table:
        """Returns the rows of a table."""
        if name not in self._tables:
            self._tables[name] = _join(name, self._leaves if name == "tensors" else None, self._batches)
        return self._tables[name]

    def values_before(self) -> pa.Table:
        """Returns rows of `values` of parameters and their gradients in the steps before."""
        return _join("values", None, list(self._before()))

    def with_values(self, values: pa.Table) -> "StepData":
        """Returns the same rows with others of `values`."""
        other = StepData(self._batches, self._leaves, self._before)
        other._tables = {**self._tables, "values": values}
        return other

    def tensor(self, blob: str) -> RawTensor:
        """Raises an error, because whole tensors are not among the rows."""
        raise NotImplementedError(blob)


def _of_sites(columns: Columns) -> Columns:
    rows = from_numpy(np.flatnonzero(to_numpy(columns["site_id"], null=-1) >= 0))
    return {name: each.take(rows) for name, each in columns.items()}


def _join(name: str, before: pa.Table | None, batches: Sequence[Batch]) -> pa.Table:
    of_table = [to_batch(name, columns) for table, columns in batches if table == name]
    rows = pa.Table.from_batches(of_table, schema=schema(name))
    joined = rows if before is None else pa.concat_tables([before, rows])
    return share_dictionaries(joined)
