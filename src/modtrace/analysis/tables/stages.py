"""Names the modules of the stages of a pipeline as those of one model."""

from collections import defaultdict
from collections.abc import Hashable, Mapping, Sequence
from functools import cached_property, partial
from itertools import count
from operator import itemgetter
from typing import NamedTuple

import numpy as np
import pyarrow as pa

from ...recording.arrow.arrays import from_list, from_numpy
from ...recording.module_path import is_below, join
from ...recording.phase import FORWARD, PHASES
from ...recording.protocols import RecordingData
from ...recording.role import GRAD_INPUT, GRAD_OUTPUT, INPUT, OUTPUT
from .columns import (
    ArrowTable,
    Bools,
    Column,
    Rows,
    bits_of,
    column_of,
    find_rows,
    mix_columns,
    phase_codes,
    take,
    text_codes,
)
from .placement import NO_MODULE
from .values import IDENTITY, PlacedValues
from .with_tables import WithTables


class NamedStage(WithTables):
    """A stage of a pipeline on one rank, whose modules have the paths of the whole model.

    Parts that keep the names of the model have these paths already. Lists of modules that begin at 0 in each stage are
    numbered on from stage to stage. Another module whose path a lower stage has, too, stands under `stages.N`; or it is
    left out, if it is a copy of that one or an `Identity` in its stead. What belongs to no stage, as an optimizer does,
    is with the first stage of its rank.
    """

    def __init__(
        self, data: RecordingData, stage: int, modules: ArrowTable, others: Rows, ends: "_Ends"
    ) -> None:
        names = ("sites", "calls", "ops", "uses", "values")
        super().__init__(
            data, modules=lambda: modules, **{name: partial(self._keep_own, name) for name in names}
        )
        self.stage = stage
        self._others = (
            others  # modules of other stages, and copies; for a later stage of a rank also what is in none
        )
        self._is_first = NO_MODULE not in others
        self._ends = ends

    def _keep_own(self, name: str) -> ArrowTable:
        return self._data.table(name).filter(from_numpy(self._kept[name]))

    @cached_property
    def _kept(self) -> dict[str, Bools]:
        """Which rows of tables belong to the stage, without the tensors that stages hand to each other."""
        sites, calls, ops, uses, values = (
            self._data.table(name) for name in ("sites", "calls", "ops", "uses", "values")
        )
        placed = PlacedValues(data=self._data, table=values)
        has_site, has_call = (self._is_own(column_of(table, "module_id")) for table in (sites, calls))
        call_id = column_of(calls, "call_id")
        has_op = self._is_of(column_of(ops, "call_id"), call_id, has_call)
        row = find_rows(call_id, column_of(uses, "consumer_call"))
        slot, slots = text_codes(uses["slot"])
        is_given = np.array([*(text.startswith("input") for text in slots), False])[slot]
        has_use = self._is_of(column_of(uses, "consumer_op"), column_of(ops, "op_id"), has_op)
        has_use &= self._is_of(column_of(uses, "consumer_call"), call_id, has_call) | (row < 0)
        has_use &= ~self._ends.is_handed_on(
            take(column_of(calls, "module_id"), row), is_given & (row >= 0), ~is_given & (row >= 0)
        )
        has_value = self._is_own(placed.module) & ~self._ends.is_handed_on(
            placed.module, placed.is_of(INPUT, GRAD_INPUT), placed.is_of(OUTPUT, GRAD_OUTPUT)
        )
        return {"sites": has_site, "calls": has_call, "ops": has_op, "uses": has_use, "values": has_value}

    def _is_own(self, module: Column) -> Bools:
        return ~np.isin(module, self._others)

    def _is_of(self, ids: Column, known: Column, is_kept: Bools) -> Bools:
        """Returns which rows refer to a kept row, or to none if the stage is the first of its rank."""
        row = find_rows(known, ids)
        return np.where(row >= 0, is_kept[row] if len(is_kept) else False, self._is_first)


class _Ends(NamedTuple):
    """The modules that are given, and those that return, what one stage hands to another."""

    given: Sequence[int]
    returned: Sequence[int]

    def is_handed_on(self, module: Column, is_given: Bools, is_returned: Bools) -> Bools:
        """Returns which tensors of calls one stage hands to another."""
        return np.asarray(
            is_given & np.isin(module, self.given) | is_returned & np.isin(module, self.returned)
        )


def name_stages(ranks: Sequence[tuple[int, RecordingData]]) -> list[tuple[int, RecordingData]]:
    """Returns the stages of a pipeline on each rank, the first stage first; other ranks as they are."""
    found = [_read_stages(data) for _, data in ranks]
    own = defaultdict[int, set[str]](set)
    for modules in found:
        for module in modules.values():
            own[module.stage].add(module.path)
    if not own:
        return [*ranks]
    names = _name_paths({stage: own[stage] for stage in sorted(own)}, _Recorded(ranks, found))
    having = defaultdict[str, list[int]](list, {"": [0]})  # stages; the rank of the first may not be read
    for (stage, _), path in names.items():
        having[path].append(stage)
    title = min((module.stage, module.title) for modules in found for module in modules.values())[1]
    parts: list[tuple[int, int, RecordingData]] = []
    for (rank, data), modules in zip(ranks, found, strict=True):
        table = _rename(data.table("modules"), modules, names, title)
        ids = column_of(table, "module_id")
        stage_of = np.array([modules[one].stage if one in modules else -1 for one in ids.tolist()], np.int64)
        stages = np.unique(stage_of[stage_of >= 0]).tolist()
        for stage in stages:
            is_other = (stage_of != stage) if stage > stages[0] else (stage_of != stage) & (stage_of >= 0)
            is_other |= [one in modules and modules[one].key not in names for one in ids.tolist()]
            others = ids[is_other]
            if stage > stages[0]:
                others = np.append(others, NO_MODULE)
            of_stage = [
                (one, names[module.key])
                for one, module in modules.items()
                if module.stage == stage and module.key in names
            ]
            ends = _Ends(
                [one for one, path in of_stage if stage > min(having[path])],
                [one for one, path in of_stage if stage < max(having[path])],
            )
            own_rows = table.filter(from_numpy(~np.isin(ids, others)))
            parts.append((stage, rank, NamedStage(data, stage, own_rows, others, ends)))
        if not stages:
            parts.append((max(own) + 1, rank, data))
    return [(rank, data) for _, rank, data in sorted(parts, key=itemgetter(0, 1))]


PathInStage = tuple[int, str]


class StageModule(NamedTuple):
    """A module of a stage."""

    stage: int
    top: int  # the module_id of the module that is the stage
    path: str  # below that module
    title: str  # the name of that module
    type: str

    @property
    def key(self) -> PathInStage:
        """The stage and the path of the module in it, which are equal on all ranks."""
        return self.stage, self.path


def _read_stages(data: RecordingData) -> dict[int, StageModule]:
    """Returns the modules of stages by their ids."""
    calls = data.table("calls")
    is_top = phase_codes(calls["phase"]) == PHASES.index(FORWARD)
    is_top &= (column_of(calls, "parent_call_id") < 0) & (column_of(calls, "stage") >= 0)
    pairs = np.stack([column_of(calls, "module_id"), column_of(calls, "stage")], axis=1)[is_top]
    tops = dict(np.unique(pairs, axis=0).tolist())
    if not tops:
        return {}
    rows = data.table("modules").select(["module_id", "root_id", "path", "name", "type"]).to_pylist()
    by_id = {row["module_id"]: row for row in rows}
    found: dict[int, StageModule] = {}
    for row in by_id.values():
        for top, stage in tops.items():
            above = by_id[top]
            if row["root_id"] == above["root_id"] and is_below(row["path"], above["path"]):
                path = row["path"][len(above["path"]) :].lstrip(".")
                title = above["name"] or above["type"]
                found[row["module_id"]] = StageModule(stage, top, path, title, row["type"])
    return found


class _Recorded:
    """What was recorded of modules that have one path in several stages; it shows which are copies."""

    def __init__(
        self, ranks: Sequence[tuple[int, RecordingData]], found: Sequence[Mapping[int, StageModule]]
    ) -> None:
        self._ranks = [
            (PlacedValues(data=data, table=data.table("values")), modules)
            for (_, data), modules in zip(ranks, found, strict=True)
        ]
        self._sites: dict[Hashable, int] = {}  # numbers by names

    def leave_out_stand_ins(self, parts: list[PathInStage]) -> list[PathInStage]:
        """Returns the modules that do not stand in for another one of them."""
        types = {module.key: module.type for _, modules in self._ranks for module in modules.values()}
        return [part for part in parts if types[part] != "Identity"] or parts

    def leave_out_copies(self, parts: list[PathInStage]) -> list[PathInStage]:
        """Returns the modules, those that are called first, without copies of the first one.

        A copy holds and returns only tensors that the first one does, too, or was neither called nor measured. What it
        is given does not matter: a table of rotary embeddings gets the activations, but for their dtype alone.
        """
        calls = {part: self._is_called(part) for part in parts}
        first, *others = sorted(parts, key=lambda part: not calls[part])
        known, _ = self._identify_tensors(first)
        distinct = [first]
        for part in others:
            tensors, are_known = self._identify_tensors(part)
            is_copy = (
                are_known and bool(np.isin(tensors, known).all()) and (len(tensors) > 0 or not calls[part])
            )
            distinct.extend([] if is_copy else [part])
        return distinct

    def _is_called(self, part: PathInStage) -> bool:
        return any(
            bool(np.isin(_find_ids(modules, part), column_of(values.data.table("calls"), "module_id")).any())
            for values, modules in self._ranks
        )

    def _identify_tensors(self, part: PathInStage) -> tuple[Rows, bool]:
        """Returns numbers that are equal where two modules have equal tensors, and whether all were measured."""
        numbers, are_measured = [np.empty(0, np.int64)], True
        for values, modules in self._ranks:
            is_made = np.isin(values.module, _find_ids(modules, part)) & ~values.is_of(INPUT)
            rows = np.flatnonzero(is_made)
            table = values.table.select(IDENTITY).take(from_numpy(rows))
            are_measured &= table["count"].null_count == 0
            sites, which = np.unique(values.site[rows], return_inverse=True)
            names = values.data.table("sites").select(_NAME_OF_SITE).take(from_numpy(sites)).to_pylist()
            site = np.array(
                [self._sites.setdefault((*name.values(),), len(self._sites)) for name in names], np.int64
            )
            places = np.stack([values.step[rows], values.phase[rows], site[which.reshape(-1)]], axis=1)
            numbers.append(mix_columns(np.concatenate([places, bits_of(table, IDENTITY)], axis=1)))
        return np.concatenate(numbers), are_measured


_NAME_OF_SITE = ["nth", "role", "slot", "op", "op_nth"]


def _find_ids(modules: Mapping[int, StageModule], part: PathInStage) -> list[int]:
    return [number for number, module in modules.items() if module.key == part]


def _name_paths(own: Mapping[int, set[str]], recorded: _Recorded) -> dict[PathInStage, str]:
    """Returns the path in one model of each path in a stage; copies and what stands in for a module have none."""
    children: dict[PathInStage, list[str]] = defaultdict(list)
    for stage, paths in own.items():
        for path in sorted(paths):
            above, _, name = path.rpartition(".")
            if path:
                children[stage, above].append(name)
    names: dict[PathInStage, str] = {}
    waiting = [("", [(stage, "") for stage in own])]
    while waiting:
        path, members = waiting.pop()
        names.update(dict.fromkeys(members, path))
        having: dict[str, list[PathInStage]] = defaultdict(list)
        for stage, above in members:
            for name in children[stage, above]:
                having[name].append((stage, join(above, name)))
        if len(having) < sum(map(len, having.values())) and all(name.isdecimal() for name in having):
            number = count()
            for member in members:
                for name in sorted(children[member], key=int):
                    waiting.append((join(path, str(next(number))), [(member[0], join(member[1], name))]))
            continue
        for name, parts in having.items():
            parts = recorded.leave_out_stand_ins(parts)
            if len(parts) == 1 or all(children[part] for part in parts):
                waiting.append((join(path, name), parts))
                continue
            first, *others = recorded.leave_out_copies(parts)
            waiting.append((join(path, name), [first]))
            for stage, below in others:
                waiting.append((f"stages.{stage}.{join(path, name)}", [(stage, below)]))
    return names


def _rename(
    table: ArrowTable, modules: Mapping[int, StageModule], names: Mapping[PathInStage, str], title: str
) -> ArrowTable:
    rows = table.to_pylist()
    for row in rows:
        module = modules.get(row["module_id"])
        if module is None or module.key not in names:
            continue
        row["path"] = row["raw_path"] = names[module.key]
        row["root_id"], row["aliases"] = module.top, []
        if row["module_id"] == module.top:
            row["parent_id"], row["name"] = None, title
    return pa.Table.from_arrays(
        [from_list([row[field.name] for row in rows], field.type) for field in table.schema],
        schema=table.schema,
    )
