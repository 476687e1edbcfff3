"""Joins rows of `values` with their sites, and finds their places in the module tree."""

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import pyarrow as pa

from ...optional import require
from ...recording.arrow.arrays import from_numpy, to_numpy
from ...recording.phase import BACKWARD, PHASES
from ...recording.protocols import RecordingData
from ...recording.statistics.moments import RAW, StatColumns, read_statistics
from .calls import Calls
from .columns import (
    Bools,
    Column,
    Rows,
    column_of,
    dictionary_codes,
    find_rows,
    keep_rows,
    lazy_column,
    phase_codes,
    take,
    text_codes,
)
from .placement import NO_MODULE, NOWHERE, Placer, read_modules

#: Statistics that are equal bit by bit where tensors are; two tensors that differ share all of them by a rare chance.
IDENTITY = ("numel", *RAW, "sumabs", "sum4", "zero_count")


@dataclass(frozen=True, kw_only=True, eq=False)
class PlacedValues:
    """Rows of `values`, each joined with its site. A column is joined when it is first requested."""

    data: RecordingData
    table: pa.Table  # the rows, with the columns that were requested

    #: The step of each row.
    step = lazy_column("step")

    @cached_property
    def phase(self) -> Column:
        """The phase of each row as a code of `PHASES`."""
        return phase_codes(self.table["phase"])

    #: A number of the measurement of each row within its step; rows that share the tensor share the number.
    moment = lazy_column("order")
    #: The id of each row's call; for a gradient, of the forward call; -1 for none.
    call_id = lazy_column("call_id")
    #: The id of the op that returned each row's tensor; -1 for none.
    op_id = lazy_column("op_id")

    @cached_property
    def site(self) -> Rows:
        """The row of the table `sites` that each row refers to; -1 for none."""
        return find_rows(column_of(self.data.table("sites"), "site_id"), self.site_id)

    @cached_property
    def module(self) -> Column:
        """The id of the module at each row's site; NO_MODULE for none."""
        return self.at_sites(column_of(self.data.table("sites"), "module_id"))

    @cached_property
    def nth(self) -> Column:
        """The number of each row's call among those of its module in the step; -1 for none."""
        return self.at_sites(column_of(self.data.table("sites"), "nth"))

    @cached_property
    def role(self) -> Column:
        """The role of each row as a code of `roles`; -1 for none."""
        return self.at_sites(self._role[0])

    @cached_property
    def roles(self) -> tuple[str, ...]:
        """The roles that occur in the table `sites`, by their codes."""
        return self._role[1]

    @cached_property
    def slot(self) -> Column:
        """The slot of each row as a code of `slots`; -1 for none."""
        return self.at_sites(self._slot[0])

    @cached_property
    def slots(self) -> tuple[str, ...]:
        """The slots that occur in the table `sites`, by their codes."""
        return self._slot[1]

    #: The id of the site of each row.
    site_id = lazy_column("site_id")
    #: The number of elements of each tensor.
    numel = lazy_column("numel")

    def read_extremes(self) -> tuple[Column, Column]:
        """Returns the minimum and the maximum of each row; NaN where null."""
        least, largest = (to_numpy(self.table[name], null=np.nan) for name in ("min", "max"))
        return least, largest

    def read_stats(self) -> StatColumns:
        """Returns the raw statistics of each row. They are not cached, as those of 1,000,000 rows take 56 MB."""
        return read_statistics(self.table)

    def is_of(self, *roles: str, rows: Rows | slice = slice(None)) -> Bools:
        """Returns a mask of all rows, or of the chosen ones, that have one of these roles."""
        has_role = np.array([*(name in roles for name in self.roles), False])
        return np.asarray(has_role[self.role[rows]])

    def take_sites(self, name: str, rows: Rows | slice = slice(None)) -> pa.ChunkedArray:
        """Returns a column of `sites` joined to all rows, or to the chosen ones; null for rows without site."""
        site = self.site[rows]
        return self.data.table("sites")[name].take(from_numpy(np.ma.masked_array(site, site < 0)))

    def to_pandas(self) -> Any:
        """Returns the rows as a `pandas.DataFrame` with further columns: `path`, `call`, `role` and `slot`.

        Raises:
            MissingLibraryError: pandas is not installed.
        """
        modules = read_modules(self.data)
        names = {number: module.path for number, module in modules.items()}
        paths = pa.array([names.get(number) for number in self.module.tolist()], pa.string())
        table = self.table.append_column("path", paths)
        for name, of_site in (("call", "nth"), ("role", "role"), ("slot", "slot")):
            table = table.append_column(name, self.take_sites(of_site))
        return require("pandas", "to_pandas()") and table.to_pandas()

    def at_sites(self, column: Column) -> Column:
        """Returns a column of `sites` joined to all rows; -1 for rows without site."""
        return take(column, self.site)

    def find_own_places(self, placer: Placer) -> Rows:
        """Returns the index of the place of each site's own module; NOWHERE for a parameter that no module owns."""
        return _find_own_places(self.module, placer)

    def find_places(self, calls: Calls, *, call_id: Column | None = None) -> Rows:
        """Returns the index of each row's place; NOWHERE for a parameter that no module owns.

        A row has the place of its call, which may differ from the module's own path if the module is shared. A row
        without call (a parameter, or one whose call is not in `calls`) has the place of its module's own path.

        Args:
            calls: the calls of the step, or of all steps.
            call_id: the call of each row, -1 for none; None for the calls that the rows name.
        """
        place = take(calls.place, find_rows(calls.call_id, self.call_id if call_id is None else call_id))
        rows = np.flatnonzero(place == NOWHERE)
        place[rows] = _find_own_places(self.module[rows], calls.placer)
        return place

    @cached_property
    def _role(self) -> tuple[Column, tuple[str, ...]]:
        return dictionary_codes(self.data.table("sites")["role"])

    @cached_property
    def _slot(self) -> tuple[Column, tuple[str, ...]]:
        return text_codes(self.data.table("sites")["slot"])


#: The columns that most analyses need; lists and texts are left out, as copying them is slow.
MEASURED_NUMBERS = ("step", "site_id", "call_id", "op_id", "phase", "order", "numel", *RAW)


def read_measured_values(data: RecordingData, step: int | None) -> PlacedValues:
    """Returns the rows of a step that have statistics, with the numeric columns."""
    table = data.table("values").select(MEASURED_NUMBERS)
    kept = np.zeros(table.num_rows, bool) if step is None else column_of(table, "step") == step
    kept &= to_numpy(table["count"].is_valid())
    return PlacedValues(data=data, table=keep_rows(table, kept))


def find_notes(data: RecordingData, call_id: Column) -> tuple[Column, tuple[str, ...]]:
    """Returns for each call the first note on its outputs, as codes and the texts of these; -1 for none."""
    values = data.table("values").select(["call_id", "op_id", "phase", "note"])
    noted = to_numpy(values["note"].is_valid()) & to_numpy(values["op_id"].is_null())
    values = values.filter(from_numpy(noted))
    values = values.filter(from_numpy(phase_codes(values["phase"]) != PHASES.index(BACKWARD)))
    codes, texts = dictionary_codes(values["note"])
    row = find_rows(call_id, column_of(values, "call_id"))
    notes = np.full(len(call_id), -1, np.int64)
    known = np.flatnonzero(row >= 0)[::-1]  # reversed, so that a call's first note is written last
    notes[row[known]] = codes[known]
    return notes, texts


def find_first_values(data: RecordingData) -> dict[int, tuple[float, ...]]:
    """Returns the minimum, maximum and sums of the first tensor in each step that a call was given or returned."""
    values = data.table("values")
    rows = np.flatnonzero(to_numpy(values["call_id"].is_valid()))
    steps, first = np.unique(column_of(values, "step")[rows], return_index=True)
    found = values.take(from_numpy(rows[first])).select(["min", "max", "sum", "sumsq"])
    return dict(
        zip(steps.tolist(), zip(*(column.to_pylist() for column in found.columns), strict=True), strict=True)
    )


def _find_own_places(module: Column, placer: Placer) -> Rows:
    places = np.full(len(module), NOWHERE, np.int64)
    owned = np.flatnonzero(module != NO_MODULE)
    places[owned] = placer.place_all(module[owned], places[owned])
    return places
