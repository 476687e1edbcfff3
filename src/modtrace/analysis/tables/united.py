"""Unites the tables of ranks that have modules of their own: the stages of a pipeline, or experts."""

from collections import Counter
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa

from ...recording.arrow.arrays import from_list, from_numpy
from ...recording.phase import OPTIMIZER, PHASES
from ...recording.protocols import RecordingData
from .columns import (
    ArrowTable,
    Column,
    Rows,
    column_of,
    count_before,
    find_rows,
    mix_columns,
    phase_codes,
    take,
    text_codes,
)
from .rank_values import RankValues, StepOrder
from .stages import NamedStage
from .values import PlacedValues
from .with_tables import WithTables

_OPTIMIZER = PHASES.index(OPTIMIZER)


class Ids(NamedTuple):
    """The ids of a rank, and what these are among those of all ranks; -1 for what is left out."""

    old: Rows
    new: Rows

    @classmethod
    def of(cls, pairs: Iterable[tuple[int, int]]) -> "Ids":
        """Returns ids, given pairs of old and new ones."""
        found = np.array([*pairs], np.int64).reshape(-1, 2)
        return cls(found[:, 0], found[:, 1])

    def find(self, ids: Column) -> Rows:
        """Returns what some of the old ids are among those of all ranks; -1 for -1 and for what is left out."""
        return take(self.new, find_rows(self.old, ids))


@dataclass(kw_only=True, eq=False)
class UnitedPart:
    """What the ids of one rank are in the united tables."""

    data: RecordingData
    modules: Ids
    own: Rows  # the modules that no lower rank has
    shared: Rows  # modules around stages of a pipeline, of which a lower stage has other calls
    steps: Ids
    calls: Ids = field(init=False)
    ops: Ids = field(init=False)
    sites: Ids = field(init=False)


class UnitedRanks(WithTables):
    """The tables of several ranks but `values`, as those of one rank that has the modules of all.

    What the lowest rank has is read from there. Of a higher rank come the modules that the lower ones lack, with their
    calls and the ops and tensors of these. The stages of a pipeline have one root: a call of it is that of all stages
    with one micro-batch, whose ops follow each other.
    """

    def __init__(self, ranks: Sequence[tuple[int, RecordingData]]) -> None:
        super().__init__(ranks[0][1])
        self._tables: dict[str, list[ArrowTable]] = {}
        self._modules: dict[Hashable, tuple[int, int | None]] = {}  # ids and stages by names
        self._stages: set[int | None] = set()
        self._sites: dict[Hashable, int] = {}
        self._op_counts = Counter[Hashable]()  # ops by module, call and name
        self._calls = Ids(np.empty(0, np.int64), np.empty(0, np.int64))  # by keys
        self._steps = {key: step for step, key in _identify_steps(self._data).items()}
        self.parts = [self._add(data) for _, data in ranks]
        self._make = {name: partial(pa.concat_tables, tables) for name, tables in self._tables.items()}

    def _add(self, data: RecordingData) -> UnitedPart:
        """Adds what a rank has and lower ones lack."""
        part = self._add_modules(data)
        self._add_calls(part)
        shifts = self._add_ops(part)
        self._add_sites(part, shifts)
        self._add_tensors(part)
        return part

    def _add_modules(self, data: RecordingData) -> UnitedPart:
        stage = data.stage if isinstance(data, NamedStage) else None
        rows = {row["module_id"]: row for row in data.table("modules").to_pylist()}
        raised, new, own, shared = self._next("modules", "module_id"), {}, [], []
        for old, name in name_modules(data).items():
            new[old], first = self._modules.setdefault(name, (old + raised, stage))
            if new[old] == old + raised:
                own.append(old)
            elif stage not in (first, *self._stages):
                shared.append(old)
        self._stages.add(stage)
        added = [
            {
                **rows[old],
                **{name: new.get(rows[old][name]) for name in ("module_id", "root_id", "parent_id")},
            }
            for old in own
        ]
        self._append("modules", _to_table(added, data.table("modules").schema), {})
        return UnitedPart(
            data=data,
            modules=Ids.of(new.items()),
            own=np.array(own, np.int64),
            shared=np.array(shared, np.int64),
            steps=Ids.of(
                (step, self._steps[key]) for step, key in _identify_steps(data).items() if key in self._steps
            ),
        )

    def _add_calls(self, part: UnitedPart) -> None:
        table, is_first = part.data.table("calls"), not len(self._calls.old)
        module, call = column_of(table, "module_id"), column_of(table, "call_id")
        phase = phase_codes(table["phase"])
        step = part.steps.find(column_of(table, "step"))
        columns = [step, part.modules.find(module), column_of(table, "nth"), phase]
        key = mix_columns(np.stack(columns, axis=1).astype(np.int64))
        key = mix_columns(np.stack([key, count_before(key)], axis=1))
        known = self._calls.find(key)
        is_added = (known < 0) & ((np.isin(module, part.own) & (step >= 0)) | is_first)
        new = np.where(is_added, call + self._next("calls", "call_id"), known)
        part.calls = Ids(call, new)
        is_shared = (known >= 0) & (np.isin(module, part.shared) | (phase == _OPTIMIZER))
        is_shared &= isinstance(part.data, NamedStage)
        if is_shared.any():
            self._stretch(new[is_shared], table.filter(from_numpy(is_shared)))
        self._calls = Ids(
            np.concatenate([self._calls.old, key[is_added]]), np.concatenate([self._calls.new, new[is_added]])
        )
        links = ("call_id", "parent_call_id", "forward_call_id", "recompute_of", "triggered_by")
        self._append(
            "calls",
            table.filter(from_numpy(is_added)),
            {
                "step": part.steps,
                "module_id": part.modules,
                "thread": self._next("calls", "thread"),
                **dict.fromkeys(links, part.calls),
            },
        )

    def _stretch(self, calls: Rows, others: ArrowTable) -> None:
        """Makes calls last from the first begin to the last end of what several stages have of them."""
        for number, table in enumerate(self._tables["calls"]):
            row = find_rows(column_of(table, "call_id"), calls)
            for name, ufunc in (("start_ns", np.minimum), ("end_ns", np.maximum)):
                times = column_of(table, name).copy()
                ufunc.at(times, row[row >= 0], column_of(others, name)[row >= 0])
                table = set_numbers(table, name, times)
            self._tables["calls"][number] = table

    def _add_ops(self, part: UnitedPart) -> dict[Hashable, int]:
        """Adds ops. Returns by how much they are renumbered in each call of which lower stages have ops, by name."""
        table, is_first = part.data.table("ops"), "ops" not in self._tables
        calls = part.data.table("calls")
        op, call = column_of(table, "op_id"), column_of(table, "call_id")
        step, nth = part.steps.find(column_of(table, "step")), column_of(table, "nth").copy()
        row = find_rows(column_of(calls, "call_id"), call)
        module, nth_call = (take(column_of(calls, name), row) for name in ("module_id", "nth"))
        name, names = text_codes(table["name"])
        is_stage = isinstance(part.data, NamedStage)
        is_shared = (module < 0) | np.isin(module, part.shared)
        is_kept = (step >= 0) & (is_first | np.isin(module, part.own) | (is_shared & is_stage))
        distinct, which = np.unique(
            np.stack([part.modules.find(module), nth_call, name], axis=1)[is_kept],
            axis=0,
            return_inverse=True,
        )
        keys = [(of, number, names[code]) for of, number, code in distinct.tolist()]
        shift = np.array([self._op_counts[key] for key in keys] or [0], np.int64)
        which = which.reshape(-1)
        nth[is_kept] += shift[which] if len(which) else 0
        most = np.zeros(len(keys), np.int64)
        np.maximum.at(most, which, nth[is_kept] + 1)
        shifts: dict[Hashable, int] = dict(zip(keys, shift.tolist(), strict=False))
        if is_stage:
            self._op_counts.update(dict(zip(keys, (most - shift).tolist(), strict=False)))
        part.ops = Ids(op, np.where(is_kept, op + self._next("ops", "op_id"), -1))
        thread = self._next("ops", "thread")
        kept = set_numbers(table, "nth", nth).filter(from_numpy(is_kept))
        self._append(
            "ops",
            kept,
            {
                "step": part.steps,
                "call_id": part.calls,
                "op_id": part.ops,
                "forward_op_id": part.ops,
                "thread": thread,
                "sequence_thread": thread,
            },
        )
        return shifts

    def _add_sites(self, part: UnitedPart, shifts: dict[Hashable, int]) -> None:
        table, raised = part.data.table("sites"), self._next("sites", "site_id")
        module, new, added = part.modules.find(column_of(table, "module_id")), {}, []
        for row, of in zip(table.to_pylist(), module.tolist(), strict=True):
            row["module_id"], old = of if of >= 0 else None, row["site_id"]
            if row["op_nth"] is not None:
                row["op_nth"] += shifts.get((of, -1 if row["nth"] is None else row["nth"], row["op"]), 0)
            row["site_id"] = old + raised
            key = tuple(row[name] for name in ("module_id", "nth", "role", "slot", "op", "op_nth"))
            new[old] = self._sites.setdefault(key, old + raised)
            if new[old] == old + raised:
                added.append(row)
        part.sites = Ids.of(new.items())
        self._append("sites", _to_table(added, table.schema), {})

    def _add_tensors(self, part: UnitedPart) -> None:
        uses, tensors, calls = (part.data.table(name) for name in ("uses", "tensors", "calls"))
        is_first = "uses" not in self._tables
        call = column_of(uses, "consumer_call")
        module = take(column_of(calls, "module_id"), find_rows(column_of(calls, "call_id"), call))
        is_of_call = (call >= 0) & (is_first | np.isin(module, np.concatenate([part.own, part.shared])))
        is_kept = (part.ops.find(column_of(uses, "consumer_op")) >= 0) | is_of_call
        raised, storage = self._next("tensors", "tensor_id"), self._next("tensors", "storage")
        ids: dict[str, Ids | int] = {
            "consumer_op": part.ops,
            "consumer_call": part.calls,
            "tensor_id": raised,
        }
        self._append("uses", uses.filter(from_numpy(is_kept)), ids)
        is_kept_tensor = np.isin(column_of(tensors, "tensor_id"), column_of(uses, "tensor_id")[is_kept])
        is_kept_tensor |= (part.ops.find(column_of(tensors, "producer_op")) >= 0) | is_first
        self._append(
            "tensors",
            tensors.filter(from_numpy(is_kept_tensor)),
            {"tensor_id": raised, "producer_op": part.ops, "site_id": part.sites, "storage": storage},
        )

    def _next(self, table: str, column: str) -> int:
        """Returns by how much the ids of the next rank are raised."""
        ends = [int(column_of(part, column).max()) + 1 for part in self._tables.get(table, ()) if len(part)]
        return max(ends, default=0)

    def _append(self, name: str, table: ArrowTable, ids: dict[str, Ids | int]) -> None:
        for column, new in ids.items():
            old = column_of(table, column)
            found = new.find(old) if isinstance(new, Ids) else np.where(old >= 0, old + new, -1)
            table = set_numbers(table, column, found)
        self._tables.setdefault(name, []).append(table)


def name_modules(data: RecordingData) -> dict[int, Hashable]:
    """Returns what names each module on all ranks, by its id: its root if there are several, its path, and which of
    the wrappers with this path it is.
    """
    rows = {row["module_id"]: row for row in data.table("modules").to_pylist()}
    roots = {old: row["name"] or row["type"] for old, row in rows.items() if row["parent_id"] is None}
    has_several = len({*roots.values()}) > 1
    seen, names = Counter[Hashable](), dict[int, Hashable]()
    for old, row in rows.items():
        key = row["root_id"], row["path"]
        names[old] = roots.get(row["root_id"], "") if has_several else "", row["path"], seen[key]
        seen[key] += 1
    return names


def _identify_steps(data: RecordingData) -> dict[int, int]:
    """Returns for each step of a rank a number that it has on all ranks."""
    order = StepOrder(data)
    steps = [column_of(data.table(name), "step") for name in ("calls", "steps", "values")]
    return {step: order.identify(step) for step in np.unique(np.concatenate(steps)).tolist()}


def set_numbers(table: ArrowTable, name: str, column: Column) -> ArrowTable:
    """Returns a table with another column of numbers, where -1 stands for null."""
    at = table.schema.get_field_index(name)
    wanted = table.schema.field(at)
    return table.set_column(at, wanted, from_numpy(np.ma.masked_array(column, column < 0), wanted.type))


def _to_table(rows: Sequence[dict[str, Any]], schema: pa.Schema) -> ArrowTable:
    columns = [from_list([row[field.name] for row in rows], field.type) for field in schema]
    return pa.Table.from_arrays(columns, schema=schema)


def unite_values(ranks: Sequence[RankValues], united: UnitedRanks) -> RankValues:
    """Returns the rows of `values` with the ids of the united tables: for each tensor that of the lowest rank.

    In a pipeline the rows of a stage come before those of the next, in each phase.
    """
    tables, keys, moments = [], [np.empty(0, np.int64)], []
    for number, (rank, part) in enumerate(zip(ranks, united.parts, strict=True)):
        values, stages = rank.placed, part.data if isinstance(part.data, NamedStage) else None
        is_of_rank = np.isin(values.module, np.concatenate([part.own, part.shared]))
        # What is in no call is of the model: a rank may have the states of some parameters only.
        is_of_rank |= (number == 0) | ((values.call_id < 0) & (values.op_id < 0))
        is_of_rank |= (values.module < 0) & (stages is not None)
        is_kept = is_of_rank & (find_rows(np.concatenate(keys), rank.key) < 0)
        is_kept &= (part.steps.find(values.step) >= 0) & (part.sites.find(values.site_id) >= 0)
        table = values.table.filter(from_numpy(is_kept))
        ids = {"step": part.steps, "site_id": part.sites, "call_id": part.calls, "op_id": part.ops}
        for name, of in ids.items():
            table = set_numbers(table, name, of.find(column_of(table, name)))
        if number:
            at = table.schema.get_field_index("blob")  # a file of the lowest rank has this name, too
            table = table.set_column(
                at, table.schema.field(at), pa.nulls(len(table), table.schema.field(at).type)
            )
        tables.append(table)
        keys.append(rank.key[is_kept])
        none = np.zeros(len(rank.key), np.int64)
        phase, stage = (values.phase, none + stages.stage) if stages is not None else (none, none)
        columns = [phase, stage, values.moment, none + number]
        moments.append(np.stack(columns, axis=1).astype(np.int64)[is_kept])
    _, order = np.unique(np.concatenate(moments), axis=0, return_inverse=True)
    table = set_numbers(pa.concat_tables(tables), "order", order.reshape(-1))
    return RankValues(
        rank=ranks[0].rank, placed=PlacedValues(data=united, table=table), key=np.concatenate(keys)
    )
