"""Adds the ops that ran inside compiled code to the ops of a step, within calls of their modules."""

from collections import Counter, defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import chain, count
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from ...recording.arrow.arrays import from_numpy
from ...recording.meta import RunMeta
from ...recording.module_path import is_below, join
from ...recording.phase import BACKWARD, FORWARD, PHASES, RECOMPUTE
from ...recording.protocols import RecordingData
from ...recording.raw_tensor import RawTensor
from ...recording.schema import schema
from .columns import column_of, keep_rows, phase_codes

_DETACH = "aten.detach.default"

#: Types of containers that are never called, so no call is added for them.
_NEVER_CALLED = frozenset({"ModuleList", "ModuleDict"})

_Row = dict[str, Any]


def with_inside(data: RecordingData, *steps: int, fused: bool = True) -> RecordingData:
    """Returns the recording with the ops inside the compiled calls of steps added, within calls of their modules.

    Where the ops of a region ran one by one (backend "aot_eager"), their recorded rows are moved into the added calls.
    Elsewhere rows without end times stand for the ops; the recorded rows of kernels outside of inductor's code are then
    dropped, because the added rows already cover them.

    Args:
        data: the recording.
        *steps: the numbers of the steps.
        fused: whether to add rows for ops that did not run one by one.
    """
    runs = _read_runs(data, steps)
    return _Added(data, runs, fused=fused) if runs else data


def _read_runs(data: RecordingData, steps: Collection[int] | None) -> list[_Row]:
    table = data.table("compiled_runs")
    if steps is not None:
        table = keep_rows(table, np.isin(column_of(table, "step"), list(steps)))
    return list(table.to_pylist())


class Unseen(NamedTuple):
    """Calls and tensors of steps that involve kernels of compiled code for which no op was recorded."""

    calls: frozenset[int]  # the ids of calls in which such kernels ran
    tensors: frozenset[int]  # the ids of tensors that such calls returned


def find_unseen(data: RecordingData, *steps: int) -> Unseen:
    """Returns the calls and tensors of steps that involve compiled kernels not recorded as ops."""
    return _add_unfused(data, steps)[1]


def with_all_inside(data: RecordingData) -> tuple[RecordingData, Unseen]:
    """Returns the recording with the ops that ran one by one in calls of their modules, and `find_unseen`."""
    return _add_unfused(data, None)


def _add_unfused(data: RecordingData, steps: Collection[int] | None) -> tuple[RecordingData, Unseen]:
    runs, calls = _read_runs(data, steps), data.table("calls")
    regions = set(column_of(calls, "call_id")[column_of(calls, "compiled") == 1].tolist())
    if not runs and not regions:
        return data, Unseen(frozenset(), frozenset())
    added, ops = _Added(data, runs, fused=False), data.table("ops")
    regions -= {run["call_id"] for run in runs}
    beside = pc.and_(
        pc.is_in(ops["call_id"], pa.array(regions, pa.int64())),
        pc.ends_with(ops["name"].cast(pa.string()), ".out"),  # kernels that inductor calls directly
    )
    before = ops["call_id"].filter(beside).to_pylist()
    returned = (run["returned"] for run in runs if run["call_id"] in added.unseen)
    unseen = Unseen(added.unseen.union(before), frozenset(chain.from_iterable(returned)) - {-1})
    return added if runs else data, unseen


@dataclass
class _Region:
    """A call that ran as compiled code, or the backward of such a call."""

    call: _Row
    #: The added calls inside, by the id of the module and the number of its call within the graph.
    calls: dict[tuple[int, int], int] = field(default_factory=dict)
    first: dict[int, int] = field(default_factory=dict)  # by module: its first call's number
    nth: Counter[tuple[int, str]] = field(default_factory=Counter)  # by call and op name: the next op's `nth`


@dataclass(frozen=True)
class _Run:
    """One run of a compiled graph, with the ops of that graph."""

    row: _Row
    ops: Sequence[_Row]
    compiled_for: int  # the module_id of the region for which the graph was compiled
    region: _Region
    origin: _Region | None  # for a backward or recompute, the region of its forward
    kept: dict[int, int]  # in a backward: the tensor that each op of the forward made
    made: dict[int, int] = field(default_factory=dict)  # the tensor that each op of this run made


class _Added:
    """A recording with the inside of compiled runs added to its tables; the tables are built when one is first read."""

    def __init__(self, data: RecordingData, runs: Sequence[_Row], *, fused: bool) -> None:
        self._data = data
        self._fused = fused
        self.unseen: frozenset[int] = frozenset()  # ids of the calls whose ops did not run one by one
        self._modules = {module["module_id"]: module for module in data.table("modules").to_pylist()}
        self._by_path = {
            (module["root_id"], module["path"]): number for number, module in self._modules.items()
        }
        #: The tables as they are now, as a running recording adds rows later, with ids that are also given out here.
        self._before = {name: data.table(name) for name in ("calls", "ops", "tensors", "uses")}
        self._ops = self._before["ops"]
        self._call_of = column_of(self._ops, "call_id").copy()
        self._nth = column_of(self._ops, "nth").copy()
        self._op_id, self._start_ns = column_of(self._ops, "op_id"), column_of(self._ops, "start_ns")
        self._names = self._ops["name"].combine_chunks()
        self._is_kept = np.ones(len(self._call_of), bool)
        self._by_call = np.argsort(self._call_of, kind="stable")  # the rows of ops sorted by their calls
        self._calls_in_order = self._call_of[self._by_call]
        self._new: dict[str, list[_Row]] = {name: [] for name in ("calls", "ops", "tensors", "uses")}
        calls = self._before["calls"]
        is_forward = phase_codes(calls["phase"]) == PHASES.index(FORWARD)
        steps, modules = (column_of(calls, name)[is_forward].tolist() for name in ("step", "module_id"))
        self._calls = Counter(zip(steps, modules, strict=True))
        self._maker_of: dict[int, int] = {}  # the added op that made each recorded tensor that a run returned
        self._ids = {
            name: count(int(column_of(self._before[table], name).max(initial=-1)) + 1)
            for table, name in (("calls", "call_id"), ("ops", "op_id"), ("tensors", "tensor_id"))
        }
        calls = calls.filter(
            pc.is_in(calls["call_id"], pa.array([run["call_id"] for run in runs], pa.int64()))
        )
        self._regions = {call["call_id"]: _Region(call) for call in calls.to_pylist()}
        self._add_all(runs)

    @property
    def meta(self) -> RunMeta:
        return self._data.meta

    def tensor(self, blob: str) -> RawTensor:
        return self._data.tensor(blob)

    def table(self, name: str) -> pa.Table:
        return self._tables[name] if name in self._tables else self._data.table(name)

    def _add_all(self, runs: Sequence[_Row]) -> None:
        """Adds the calls and ops inside of all compiled runs."""
        compilations = {
            row["compile_id"]: row
            for row in self._data.table("compilations").to_pylist()
            if row["phase"] == FORWARD and row["module_id"] is not None
        }
        inside: dict[tuple[int, bool], list[_Row]] = defaultdict(list)
        for op in self._data.table("compiled_ops").to_pylist():
            inside[op["compilation_id"], op["phase"] == BACKWARD].append(op)
        forwards: dict[tuple[int, str], list[_Run]] = defaultdict(list)
        for row in sorted(runs, key=lambda run: run["op_id"]):
            region, compilation = self._regions.get(row["call_id"]), compilations.get(row["compile_id"])
            if region is None or compilation is None:
                continue
            is_backward, forward_id = row["phase"] == BACKWARD, region.call["forward_call_id"]
            ops = inside[compilation["compilation_id"], is_backward]
            before = forwards[forward_id, row["compile_id"]] if is_backward else []
            forward = before.pop() if before else None  # backward goes through the runs of forward in reverse
            origin = self._regions.get(forward_id) or self._regions.get(region.call["recompute_of"])
            kept = {} if forward is None else forward.made
            run = _Run(row, ops, compilation["module_id"], region, origin, kept)
            if not is_backward:
                forwards[row["call_id"], row["compile_id"]].append(run)
            self._add(run)

    def _add(self, run: _Run) -> None:
        end_ns = np.inf if run.row["end_ns"] is None else run.row["end_ns"]
        call = -2 if run.row["call_id"] is None else run.row["call_id"]
        of_call = self._by_call[slice(*np.searchsorted(self._calls_in_order, [call, call + 1]))]
        ran = of_call[(self._op_id[of_call] > run.row["op_id"]) & (self._start_ns[of_call] <= end_ns)]
        names = [*map(str, self._names.take(pa.array(ran)).to_pylist())]
        places = _find_in_order([op["name"] for op in run.ops], names)
        if places is None:
            self.unseen |= {run.region.call["call_id"]}
            if self._fused:
                self._replace(ran.tolist(), names, run)
            return
        # The recorded rows are kept, because they have times and arguments.
        for row, op in zip(ran[places].tolist(), run.ops, strict=True):
            call = self._find_call(op, run, int(self._start_ns[row]))
            self._call_of[row], self._nth[row] = call, run.region.nth[call, op["name"]]
            run.region.nth[call, op["name"]] += 1

    def _replace(self, rows: Sequence[int], names: Sequence[str], run: _Run) -> None:
        """Adds rows for all ops of the graph, and drops the recorded ops that they cover, and those of `detach`."""
        inside = Counter(_packet(op["name"]) for op in run.ops)
        for row, name in zip(rows, names, strict=True):
            inside[_packet(name)] -= 1
            self._is_kept[row] = inside[_packet(name)] < 0 and name != _DETACH
        for number, op in enumerate(run.ops):
            start_ns = run.row["start_ns"] + number
            call = self._find_call(op, run, start_ns)
            op_id = next(self._ids["op_id"])
            self._new["ops"].append(
                {
                    "op_id": op_id,
                    "step": run.row["step"],
                    "call_id": call,
                    "phase": run.row["phase"],
                    "name": op["name"],
                    "nth": run.region.nth[call, op["name"]],
                    "args": "{}",
                    "thread": run.row["thread"],
                    "is_view": op["is_view"],
                    "start_ns": start_ns,
                    "raised": False,
                    "source": op["source"],
                    "kernel": "+".join(op["kernels"]) or None,
                }
            )
            run.region.nth[call, op["name"]] += 1
            self._new["uses"] += [
                {"consumer_op": op_id, "slot": f"[{slot}]", "tensor_id": tensor}
                for slot, tensor in enumerate(_find_read(op, run))
            ]
            returned = run.row["returned"]
            outputs = [returned[place] for place in op["returned"] or () if place < len(returned)]
            recorded = [tensor for tensor in outputs if tensor >= 0]
            self._maker_of.update(dict.fromkeys(recorded, op_id))
            if recorded:
                run.made[number] = recorded[0]
            elif op["shape"] is not None:
                run.made[number] = next(self._ids["tensor_id"])
                self._new["tensors"].append(_new_tensor(run.made[number], op_id, op))

    def _find_call(self, op: _Row, run: _Run, start_ns: int) -> int:
        """Returns the added call of the module that an op belongs to, and makes the call on first request."""
        region, module_id, outer = run.region, op["module_id"], run.region.call["module_id"]
        if module_id is not None and run.compiled_for != outer:
            module_id = self._find_twin(module_id, run.compiled_for, outer)
        module, around = self._modules.get(module_id), self._modules.get(outer)
        if module is None or around is None or module["root_id"] != around["root_id"]:
            return int(region.call["call_id"])
        if not is_below(module["path"], around["path"]):
            return int(region.call["call_id"])
        return self._find_call_inside(module_id, op["calls"] or (), run, start_ns)

    def _find_call_inside(self, module_id: int, numbers: Sequence[int], run: _Run, start_ns: int) -> int:
        """Returns the call of a module inside a region, and makes it on first request.

        Args:
            module_id: the module.
            numbers: the number of the call within the graph, last, and before it the numbers of the calls around it.
            run: the run of the graph.
            start_ns: the start time of the call if it is made now.
        """
        region = run.region
        if module_id == region.call["module_id"]:
            return int(region.call["call_id"])
        number = numbers[-1] if numbers else 0
        if (module_id, number) not in region.calls:
            above = self._modules.get(self._modules[module_id]["parent_id"])
            while above is not None and above["type"] in _NEVER_CALLED:
                above = self._modules.get(above["parent_id"])
            parent = region.call["call_id"]
            if above is not None:
                parent = self._find_call_inside(above["module_id"], numbers[:-1], run, start_ns)
            call = region.calls[module_id, number] = next(self._ids["call_id"])
            repeated = None if run.origin is None else run.origin.calls.get((module_id, number))
            self._new["calls"].append(
                {
                    "call_id": call,
                    "step": run.row["step"],
                    "module_id": module_id,
                    "nth": self._number(module_id, number, run),
                    "parent_call_id": parent,
                    "phase": region.call["phase"],
                    "forward_call_id": repeated if region.call["phase"] == BACKWARD else None,
                    "recompute_of": repeated if region.call["phase"] == RECOMPUTE else None,
                    "thread": region.call["thread"],
                    "start_ns": start_ns,
                    "raised": False,
                    "compiled": True,
                }
            )
        return region.calls[module_id, number]

    def _number(self, module_id: int, number: int, run: _Run) -> int:
        """Returns the number in its step of the module's call that is the `number`-th in the graph."""
        region = run.region
        if region.call["phase"] == FORWARD:
            key = run.row["step"], module_id
            first = region.first.setdefault(module_id, self._calls[key])
            self._calls[key] = max(self._calls[key], first + number + 1)
        elif run.origin is None:
            first = region.call["nth"]
        else:
            first = run.origin.first.get(module_id, 0)
        return int(first + number)

    def _find_twin(self, module_id: int, compiled_for: int, outer: int) -> int | None:
        """Returns the module whose path below `outer` is that of `module_id` below the module `compiled_for`."""
        module, around, other = map(self._modules.get, (module_id, compiled_for, outer))
        if module is None or around is None or other is None:
            return None
        if module["path"] == around["path"]:
            return outer
        path = module["path"].removeprefix(f"{around['path']}." if around["path"] else "")
        return self._by_path.get((other["root_id"], join(other["path"], path)))

    @cached_property
    def _tables(self) -> dict[str, pa.Table]:
        call_id = pa.array(self._call_of, pa.int64(), mask=self._call_of < 0)
        ops = _set(_set(self._ops, "call_id", call_id), "nth", pa.array(self._nth, pa.int32()))
        calls, tensors = self._before["calls"], self._before["tensors"]
        has_run = pc.is_in(calls["call_id"], pa.array(list(self._regions), pa.int64()))
        producer, rows = column_of(tensors, "producer_op").copy(), column_of(tensors, "tensor_id")
        for row in np.flatnonzero(np.isin(rows, np.array([*self._maker_of], np.int64))).tolist():
            producer[row] = self._maker_of[int(rows[row])]
        producers = pa.array(producer, pa.int64(), mask=producer < 0)
        tables = {
            "ops": ops.filter(from_numpy(self._is_kept)),
            "tensors": _set(tensors, "producer_op", producers),
            "calls": _set(calls, "compiled", pc.or_(pc.fill_null(calls["compiled"], False), has_run)),
            "uses": self._before["uses"],
        }
        for name, new in self._new.items():
            tables[name] = pa.concat_tables([tables[name], pa.Table.from_pylist(new, schema=schema(name))])
        return tables


def _find_read(op: _Row, run: _Run) -> Iterator[int]:
    """Yields the ids of the tensors that an op of a run reads, where they are known."""
    yield from (run.made[place] for place in op["inputs"] if place in run.made)
    yield from (run.kept[place] for place in op["saved"] or () if place in run.kept)
    given = run.row["given"]
    yield from (given[place] for place in op["given"] or () if place < len(given) and given[place] >= 0)


def _find_in_order(wanted: Sequence[str], names: Sequence[str]) -> list[int] | None:
    """Returns positions at which the wanted names occur in this order among others; None if one is missing."""
    rest = iter(enumerate(names))
    places = [next((place for place, name in rest if name == one), -1) for one in wanted]
    return None if not places or places[-1] < 0 else places


def _packet(name: str) -> str:
    """Returns the name of an op without its overload: `aten.add` for `aten.add.Tensor`."""
    return name.rpartition(".")[0] if name.count(".") > 1 else name


def _new_tensor(tensor_id: int, op_id: int, op: Mapping[str, Any]) -> _Row:
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
