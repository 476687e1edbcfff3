"""Puts the ops inside of compiled code among the ops of a step, each in a call of its module."""

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from ...recording.meta import RunMeta
from ...recording.module_path import is_below
from ...recording.phase import BACKWARD, FORWARD
from ...recording.protocols import RecordingData
from ...recording.raw_tensor import RawTensor
from ...recording.schema import schema
from .calls import column_of

#: Containers that nobody calls.
_NEVER_CALLED = frozenset({"ModuleList", "ModuleDict"})

_Row = dict[str, Any]


def with_inside(data: RecordingData, step: int) -> RecordingData:
    """Returns the recording with the ops inside of the compiled calls of a step, in calls of their modules.

    Where the ops of a region have run one by one (backend "aot_eager"), those rows are put into the calls. Elsewhere
    rows without times stand for the ops, and those of kernels outside of inductor's code, which are recorded, are left
    out: they are among the ops inside. Of several compilations of a function it is the one whose ops have run, or else
    the last one up to the step.
    """
    if not data.table("compiled_ops").num_rows:
        return data
    added = _Added(data, step)
    added.add_all()
    return added.to_data()


@dataclass(frozen=True)
class _WithInside:
    """A recording with some other tables."""

    data: RecordingData
    tables: Mapping[str, pa.Table]

    @property
    def meta(self) -> RunMeta:
        return self.data.meta

    def table(self, name: str) -> pa.Table:
        return self.tables[name] if name in self.tables else self.data.table(name)

    def tensor(self, blob: str) -> RawTensor:
        return self.data.tensor(blob)


@dataclass
class _Region:
    """A call that ran as compiled code, or the backward of one."""

    call: _Row
    of_module: dict[int, int] = field(default_factory=dict)  # the call of each module inside, by its id


class _Added:
    """Collects what is added to the tables."""

    def __init__(self, data: RecordingData, step: int) -> None:
        self._data = data
        self._step = step
        self._modules = {each["module_id"]: each for each in data.table("modules").to_pylist()}
        self._ops = data.table("ops")
        self._call_of = column_of(self._ops, "call_id").copy()
        self._nth = column_of(self._ops, "nth").copy()
        self._is_kept = np.ones(len(self._call_of), bool)
        self._new: dict[str, list[_Row]] = {name: [] for name in ("calls", "ops", "tensors", "uses")}
        self._ids = {
            name: count(int(column_of(data.table(table), name).max(initial=-1)) + 1)
            for table, name in (("calls", "call_id"), ("ops", "op_id"), ("tensors", "tensor_id"))
        }
        self._made = self._read_made()

    def _read_made(self) -> dict[int, dict[str, list[dict[str, list[_Row]]]]]:
        """Returns by module and function what its compilations have inside, the newest first, by phase."""
        inside: dict[int, dict[str, list[_Row]]] = defaultdict(lambda: {FORWARD: [], BACKWARD: []})
        for op in self._data.table("compiled_ops").to_pylist():
            inside[op["compilation_id"]][op["phase"]].append(op)
        made: dict[int, dict[str, list[dict[str, list[_Row]]]]] = defaultdict(dict)
        for row in self._data.table("compilations").to_pylist():
            known = row["compilation_id"] in inside and row["module_id"] is not None
            if known and row["step"] <= self._step:
                of_function = made[row["module_id"]].setdefault(row["function"], [])
                of_function.insert(0, inside[row["compilation_id"]])
        return made

    def add_all(self) -> None:
        """Adds what is inside of all compiled calls of the step."""
        calls = self._data.table("calls")
        rows = calls.filter(pc.equal(calls["step"], self._step)).to_pylist()
        compiled = {each["call_id"] for each in rows if each["compiled"]}
        regions = {}
        for call in rows:
            is_region = call["call_id"] in compiled or call["parent_call_id"] in compiled
            if call["phase"] == FORWARD and is_region and call["module_id"] in self._made:
                regions[call["call_id"]] = self._add(_Region(call), FORWARD, None)
        for call in rows:
            forward = regions.get(call["forward_call_id"])
            if call["phase"] == BACKWARD and forward and call["module_id"] == forward.call["module_id"]:
                self._add(_Region(call), BACKWARD, forward)

    def _add(self, region: _Region, phase: str, forward: _Region | None) -> _Region:
        ran = np.flatnonzero(self._call_of == region.call["call_id"])
        names = [*map(str, self._ops["name"].take(pa.array(ran)).to_pylist())]
        of_functions = list(self._made[region.call["module_id"]].values())
        if phase == BACKWARD:
            of_functions.reverse()
        newest = [op for each in of_functions for op in each[0][phase]]
        choices = [newest]
        if len(of_functions) == 1:
            choices += [each[phase] for each in of_functions[0][1:]]
        for ops in choices:
            found = _find_all([each["name"] for each in ops], names)
            if found is not None:
                self._put(ran[found].tolist(), ops, region, forward)
                return region
        self._replace(ran.tolist(), names, newest, region, forward)
        return region

    def _put(
        self, rows: Sequence[int], ops: Sequence[_Row], region: _Region, forward: _Region | None
    ) -> None:
        """Puts recorded ops into the calls of their modules."""
        start_ns = column_of(self._ops, "start_ns")
        nth: Counter[tuple[int, str]] = Counter()
        for row, op in zip(rows, ops, strict=True):
            call = self._call(op["module_id"], region, forward, int(start_ns[row]))
            self._call_of[row], self._nth[row] = call, nth[call, op["name"]]
            nth[call, op["name"]] += 1

    def _replace(
        self,
        rows: Sequence[int],
        names: Sequence[str],
        ops: Sequence[_Row],
        region: _Region,
        forward: _Region | None,
    ) -> None:
        """Adds ops in place of those recorded ones that are among them."""
        inside = Counter(_packet(op["name"]) for op in ops)
        for row, name in zip(rows, names, strict=True):
            if inside[_packet(name)]:
                inside[_packet(name)] -= 1
                self._is_kept[row] = False
        nth: Counter[tuple[int, str]] = Counter()
        made: dict[int, int] = {}  # the tensor of each op
        for at, op in enumerate(ops):
            start_ns = region.call["start_ns"] + at
            call = self._call(op["module_id"], region, forward, start_ns)
            op_id = next(self._ids["op_id"])
            self._new["ops"].append(
                {
                    "op_id": op_id,
                    "step": self._step,
                    "call_id": call,
                    "phase": region.call["phase"],
                    "name": op["name"],
                    "nth": nth[call, op["name"]],
                    "args": "{}",
                    "thread": region.call["thread"],
                    "is_view": op["is_view"],
                    "start_ns": start_ns,
                    "raised": False,
                    "source": op["source"],
                    "kernel": "+".join(op["kernels"]) or None,
                }
            )
            nth[call, op["name"]] += 1
            self._new["uses"] += [
                {"consumer_op": op_id, "slot": f"[{slot}]", "tensor_id": made[each]}
                for slot, each in enumerate(op["inputs"])
                if each in made
            ]
            if op["shape"] is not None:
                made[at] = next(self._ids["tensor_id"])
                self._new["tensors"].append(_tensor(made[at], op_id, op))

    def _call(self, module_id: int | None, region: _Region, forward: _Region | None, start_ns: int) -> int:
        """Returns the call of a module inside of a region, which is made when it is first asked for."""
        outer = region.call["module_id"]
        if module_id is None or module_id == outer or not self._is_inside(module_id, outer):
            return int(region.call["call_id"])
        if module_id not in region.of_module:
            parent = self._call(self._above(module_id), region, forward, start_ns)
            call = region.of_module[module_id] = next(self._ids["call_id"])
            self._new["calls"].append(
                {
                    "call_id": call,
                    "step": self._step,
                    "module_id": module_id,
                    "nth": region.call["nth"],
                    "parent_call_id": parent,
                    "phase": region.call["phase"],
                    "forward_call_id": forward.of_module.get(module_id) if forward else None,
                    "thread": region.call["thread"],
                    "start_ns": start_ns,
                    "raised": False,
                    "compiled": True,
                }
            )
        return region.of_module[module_id]

    def _is_inside(self, module_id: int, outer: int) -> bool:
        module, around = self._modules.get(module_id), self._modules.get(outer)
        if module is None or around is None or module["root_id"] != around["root_id"]:
            return False
        return is_below(module["path"], around["path"])

    def _above(self, module_id: int) -> int | None:
        """Returns the module around that is called."""
        above = self._modules[module_id]["parent_id"]
        while above is not None and self._modules[above]["type"] in _NEVER_CALLED:
            above = self._modules[above]["parent_id"]
        return None if above is None else int(above)

    def to_data(self) -> RecordingData:
        """Returns the recording with what was collected."""
        call_id = pa.array(self._call_of, pa.int64(), mask=self._call_of < 0)
        tables = {"ops": _set(_set(self._ops, "call_id", call_id), "nth", pa.array(self._nth, pa.int32()))}
        tables["ops"] = tables["ops"].filter(pa.array(self._is_kept))
        for name, rows in self._new.items():
            table = tables.get(name, self._data.table(name))
            new = pa.Table.from_pylist(rows, schema=schema(name))
            tables[name] = pa.concat_tables([table, new])
        return _WithInside(self._data, tables)


def _find_all(wanted: Sequence[str], names: Sequence[str]) -> list[int] | None:
    """Returns where the wanted names stand among others, in their order; None if one is not there."""
    at = iter(enumerate(names))
    found = [next((position for position, name in at if name == each), -1) for each in wanted]
    return None if not found or found[-1] < 0 else found


def _packet(name: str) -> str:
    """Returns the name of an op without its overload."""
    return name.rpartition(".")[0] if name.count(".") > 1 else name


def _tensor(tensor_id: int, op_id: int, op: Mapping[str, Any]) -> _Row:
    return {
        "tensor_id": tensor_id,
        "shape": op["shape"],
        "stride": [],
        "offset": 0,
        "conj": False,
        "neg": False,
        "dtype": op["dtype"],
        "requires_grad": False,
        "producer_op": op_id,
        "slot": "",
    }


def _set(table: pa.Table, name: str, column: pa.Array) -> pa.Table:
    return table.set_column(table.schema.get_field_index(name), table.schema.field(name), column)
