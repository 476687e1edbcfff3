"""Names the modules of the stages of a pipeline as those of one model."""

from collections import defaultdict
from collections.abc import Mapping, Sequence
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
from .columns import ArrowTable, Bools, Column, Rows, column_of, find_rows, phase_codes, take, text_codes
from .placement import NO_MODULE
from .values import PlacedValues
from .with_tables import WithTables


class NamedStage(WithTables):
    """A stage of a pipeline on one rank, whose modules have the paths of the whole model.

    Parts that keep the names of the model have these paths already. Lists of modules that begin at 0 in each stage are
    numbered on from stage to stage. Another module whose path a lower stage has, too, stands under `stages.N`. What
    belongs to no stage, as an optimizer does, is with the first stage of its rank.
    """

    def __init__(
        self, data: RecordingData, stage: int, modules: ArrowTable, others: Rows, ends: "_Ends"
    ) -> None:
        names = ("sites", "calls", "ops", "uses", "values")
        super().__init__(
            data, modules=lambda: modules, **{name: partial(self._keep_own, name) for name in names}
        )
        self.stage = stage
        self._others = others  # the modules of other stages; for a later stage of a rank also what is in none
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
    names = _name_paths({stage: own[stage] for stage in sorted(own)})
    title = min((module.stage, module.title) for modules in found for module in modules.values())[1]
    parts: list[tuple[int, int, RecordingData]] = []
    for (rank, data), modules in zip(ranks, found, strict=True):
        table = _rename(data.table("modules"), modules, names, title)
        ids = column_of(table, "module_id")
        stage_of = np.array([modules[one].stage if one in modules else -1 for one in ids.tolist()], np.int64)
        stages = np.unique(stage_of[stage_of >= 0]).tolist()
        for stage in stages:
            is_other = (stage_of != stage) if stage > stages[0] else (stage_of != stage) & (stage_of >= 0)
            others = ids[is_other]
            if stage > stages[0]:
                others = np.append(others, NO_MODULE)
            top = next(module.top for module in modules.values() if module.stage == stage)
            ends = _Ends([top] if stage > 0 else [], [top] if stage < max(own) else [])
            own_rows = table.filter(from_numpy(~np.isin(ids, others)))
            parts.append((stage, rank, NamedStage(data, stage, own_rows, others, ends)))
        if not stages:
            parts.append((max(own) + 1, rank, data))
    return [(rank, data) for _, rank, data in sorted(parts, key=itemgetter(0, 1))]


class StageModule(NamedTuple):
    """A module of a stage."""

    stage: int
    top: int  # the module_id of the module that is the stage
    path: str  # below that module
    title: str  # the name of that module


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
                found[row["module_id"]] = StageModule(stage, top, path, above["name"] or above["type"])
    return found


def _name_paths(own: Mapping[int, set[str]]) -> dict[tuple[int, str], str]:
    """Returns the path in one model of each path in a stage."""
    children: dict[tuple[int, str], list[str]] = defaultdict(list)
    for stage, paths in own.items():
        for path in sorted(paths):
            above, _, name = path.rpartition(".")
            if path:
                children[stage, above].append(name)
    names: dict[tuple[int, str], str] = {}
    waiting = [("", [(stage, "") for stage in own])]
    while waiting:
        path, members = waiting.pop()
        names.update(dict.fromkeys(members, path))
        having: dict[str, list[tuple[int, str]]] = defaultdict(list)
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
            is_container = all(children[part] for part in parts)
            waiting.append((join(path, name), parts if is_container else parts[:1]))
            for stage, below in () if is_container else parts[1:]:
                waiting.append((f"stages.{stage}.{join(path, name)}", [(stage, below)]))
    return names


def _rename(
    table: ArrowTable, modules: Mapping[int, StageModule], names: Mapping[tuple[int, str], str], title: str
) -> ArrowTable:
    rows = table.to_pylist()
    for row in rows:
        module = modules.get(row["module_id"])
        if module is None:
            continue
        row["path"] = row["raw_path"] = names[module.stage, module.path]
        row["root_id"], row["aliases"] = module.top, []
        if row["module_id"] == module.top:
            row["parent_id"], row["name"] = None, title
    return pa.Table.from_arrays(
        [from_list([row[field.name] for row in rows], field.type) for field in table.schema],
        schema=table.schema,
    )
