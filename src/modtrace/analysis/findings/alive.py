"""Sums up what lived when an op could not have memory, from the table `alive`."""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from ...recording.module_path import number_free
from ...recording.out_of_memory import requested_bytes
from ...recording.phase import BACKWARD, FORWARD, OPTIMIZER, RECOMPUTE
from ...recording.role import BUFFER, OPTIMIZER_STATE, PARAMETER, PARAMETER_GRAD
from ..tables.columns import column_of
from ..tables.indexed_tables import IndexedTables
from ..tables.placement import NO_PLACE_NAMES, Module, name_module, read_modules
from ..tables.placement import OUTSIDE as OUTSIDE_OF_TREE

PARAMETERS, GRADIENTS, STATES, BUFFERS = "parameters", "gradients", "optimizer states", "buffers"
ACTIVATIONS, EARLIER, FLOWING = "activations", "results of earlier steps", "gradients of activations"
INPUTS, OUTSIDE, UNKNOWN = "inputs", "results outside of modules", "memory that no op has met"

_OF_ROLES = {
    PARAMETER: PARAMETERS,
    PARAMETER_GRAD: GRADIENTS,
    OPTIMIZER_STATE: STATES,
    BUFFER: BUFFERS,
}
_OF_PHASES = {FORWARD: ACTIVATIONS, RECOMPUTE: ACTIVATIONS, BACKWARD: FLOWING, OPTIMIZER: STATES}


@dataclass(frozen=True, kw_only=True)
class Holder:
    """One storage that lived, and the op that made it."""

    bytes: int
    kind: str  # ACTIVATIONS, ...
    place: str  # the path of the module in which it was made, or which has it
    name: str  # the same; of a parameter, a gradient or a state with its name in the module
    op: str | None = None
    step: int | None = None  # in which it was made
    shape: tuple[int, ...] | None = None
    dtype: str | None = None
    source: str | None = None  # the line, if it was recorded


@dataclass(frozen=True, kw_only=True)
class Checkpointing:
    """What lives inside of modules that repeat, and would not if each of them were checkpointed."""

    modules: tuple[Module, ...]
    freed_bytes: int  # without what they return, and without one of them, whose recompute needs it


@dataclass(frozen=True, kw_only=True)
class OutOfMemory:
    """What lived when an op could not have memory."""

    step: int
    op: Mapping[str, Any] | None  # the row in `ops`
    module_id: int | None  # in whose call the op ran
    error: str
    requested_bytes: int | None
    holders: tuple[Holder, ...]  # the largest first
    checkpointing: Checkpointing | None

    @cached_property
    def bytes(self) -> int:
        """All that lived."""
        return sum(one.bytes for one in self.holders)

    @cached_property
    def by_kind(self) -> Mapping[str, int]:
        """The bytes by kind, the largest first."""
        return _sum((one.kind, one.bytes) for one in self.holders)

    @cached_property
    def by_module(self) -> Mapping[str, int]:
        """The bytes by module, the largest first; those whose paths differ in numbers are one: `blocks.*.fc`."""
        alike: dict[str, set[str]] = {}
        for one in self.holders:
            alike.setdefault(number_free(one.place), set()).add(one.place)
        names = {path: next(iter(paths)) if len(paths) == 1 else path for path, paths in alike.items()}
        return _sum((names[number_free(one.place)], one.bytes) for one in self.holders)

    @cached_property
    def by_line(self) -> Mapping[str, int]:
        """The bytes by the line that made them, the largest first; empty if lines were not recorded."""
        return _sum((one.source, one.bytes) for one in self.holders if one.source is not None)


def _sum(parts: Iterable[tuple[str, int]]) -> dict[str, int]:
    total: Counter[str] = Counter()
    for name, size in parts:
        total[name] += size
    return dict(total.most_common())


def find_out_of_memory(run: IndexedTables, step: int) -> OutOfMemory:
    """Returns what lived when an op could not have memory in a step, which the table `alive` has to have."""
    rows = run.find("alive", step=np.array([step])).to_pylist()
    found = _Makers(run, rows)
    error, op = rows[0]["error"], run.find_op(rows[0]["op_id"])
    holders = [found.describe(row, step) for row in rows]
    return OutOfMemory(
        step=step,
        op=op,
        module_id=found.module_of(op),
        error=error,
        requested_bytes=requested_bytes(error),
        holders=tuple(sorted(holders, key=lambda one: -one.bytes)),
        checkpointing=_find_checkpointing(run, found, list(zip(rows, holders, strict=True)), step),
    )


class _Makers:
    """The ops that made storages, and the modules in which they ran."""

    def __init__(self, run: IndexedTables, rows: Sequence[Mapping[str, Any]]) -> None:
        self._modules = read_modules(run.data)
        self._run = run
        storages = np.array([row["storage"] for row in rows if row["storage"] is not None], np.int64)
        tensors = run.find("tensors", storage=storages)
        self.tensors: dict[int, Mapping[str, Any]] = {}  # the first one of each storage
        self.storages: dict[int, int] = {}  # by tensor
        for tensor in tensors.to_pylist():
            self.tensors.setdefault(tensor["storage"], tensor)
            self.storages[tensor["tensor_id"]] = tensor["storage"]
        failed = [row["op_id"] for row in rows[:1]]
        made = [
            tensor["producer_op"] for tensor in self.tensors.values() if tensor["producer_op"] is not None
        ]
        self.ops = self.find_ops([*failed, *made])

    def find_ops(self, op_ids: Sequence[int]) -> dict[int, Mapping[str, Any]]:
        """Returns the rows of ops by their ids, each with the `module_id` of its call."""
        columns = ("op_id", "step", "call_id", "phase", "name", "source")
        ops = self._run.find("ops", columns, op_id=np.array(op_ids, np.int64))
        calls = self._run.find("calls", ("call_id", "module_id"), call_id=column_of(ops, "call_id"))
        module = dict(zip(calls["call_id"].to_pylist(), calls["module_id"].to_pylist(), strict=True))
        return {op["op_id"]: {**op, "module_id": module.get(op["call_id"])} for op in ops.to_pylist()}

    def module_of(self, op: Mapping[str, Any] | None) -> int | None:
        """Returns the module in whose call an op ran."""
        found = None if op is None else self.ops.get(op["op_id"])
        return None if found is None else found["module_id"]

    def path_of(self, module_id: int | None) -> str | None:
        """Returns the path of a module; None if there is none."""
        module = self._modules.get(-1 if module_id is None else module_id)
        return None if module is None else module.path

    def describe(self, row: Mapping[str, Any], step: int) -> Holder:
        """Returns a row of `alive` with the op that made the storage."""
        tensor = self.tensors.get(row["storage"])
        op = None if tensor is None else self.ops.get(tensor["producer_op"])
        module_id = row["module_id"] if row["role"] else None if op is None else op["module_id"]
        module = self._modules.get(-1 if module_id is None else module_id)
        place = NO_PLACE_NAMES[OUTSIDE_OF_TREE] if module is None else name_module(self._run.data, module)
        in_place = [place if module and module.path else "", row["slot"]]
        return Holder(
            bytes=row["bytes"],
            kind=_find_kind(row, tensor, op, step),
            place=place,
            name=".".join(filter(None, in_place)) if row["role"] else place,
            op=None if op is None or row["role"] else op["name"],
            step=None if op is None else op["step"],
            shape=None if tensor is None else tuple(tensor["shape"]),
            dtype=None if tensor is None else tensor["dtype"],
            source=None if op is None or row["role"] else op["source"],
        )


def _find_kind(
    row: Mapping[str, Any], tensor: Mapping[str, Any] | None, op: Mapping[str, Any] | None, step: int
) -> str:
    if row["role"]:
        return _OF_ROLES[row["role"]]
    if tensor is None:
        return UNKNOWN
    if op is None:
        return INPUTS if tensor["producer_op"] is None else UNKNOWN
    kind = _OF_PHASES.get(op["phase"], OUTSIDE)
    return EARLIER if kind in (ACTIVATIONS, FLOWING) and op["step"] < step else kind


def _find_checkpointing(
    run: IndexedTables, found: _Makers, rows: Sequence[tuple[Mapping[str, Any], Holder]], step: int
) -> Checkpointing | None:
    """Returns the modules that repeat, alike in one list, whose checkpointing would free most."""
    sizes = {row["storage"]: one.bytes for row, one in rows if one.kind == ACTIVATIONS}
    made_in = {storage: found.ops[found.tensors[storage]["producer_op"]]["module_id"] for storage in sizes}
    paths = {module_id: found.path_of(module_id) for module_id in set(made_in.values())}
    readers = _find_readers(run, found, sizes)
    best: Checkpointing | None = None
    for modules in _find_lists(read_modules(run.data).values()):
        freed = []
        for module in modules:
            below = f"{module.path}."
            inside = {
                module_id
                for module_id, path in paths.items()
                if path is not None and f"{path}.".startswith(below)
            }
            own = [storage for storage in sizes if made_in[storage] in inside]
            read_outside = {
                storage
                for storage in own
                if any(path is None or not f"{path}.".startswith(below) for path in readers.get(storage, ()))
            }
            freed.append(sum(sizes[storage] for storage in own if storage not in read_outside))
        total = sum(freed) - max(freed)
        if total > (0 if best is None else best.freed_bytes):
            used = tuple(module for module, size in zip(modules, freed, strict=True) if size)
            best = Checkpointing(modules=used, freed_bytes=total)
    return best


def _find_readers(
    run: IndexedTables, found: _Makers, wanted: Mapping[int, int]
) -> dict[int, set[str | None]]:
    """Returns the paths of the modules in which each storage was read; None stands for outside of modules."""
    tensors = [tensor for tensor, storage in found.storages.items() if storage in wanted]
    uses = run.find("uses", ("tensor_id", "consumer_op"), tensor_id=np.array(tensors, np.int64)).to_pylist()
    ops = found.find_ops([use["consumer_op"] for use in uses if use["consumer_op"] is not None])
    readers: dict[int, set[str | None]] = {}
    for use in uses:
        op = ops.get(-1 if use["consumer_op"] is None else use["consumer_op"])
        if op is not None and op["phase"] == FORWARD:
            readers.setdefault(found.storages[use["tensor_id"]], set()).add(found.path_of(op["module_id"]))
    return readers


def _find_lists(modules: Iterable[Module]) -> list[list[Module]]:
    """Returns the lists of modules of one class in one parent, outer ones first."""
    lists: dict[tuple[int, str, str], dict[int, Module]] = {}
    for module in modules:
        parent, _, last = module.path.rpartition(".")
        if last.isdigit():
            lists.setdefault((module.root_id, parent, module.type), {})[module.module_id] = module
    several = [[*alike.values()] for alike in lists.values() if len(alike) > 1]
    return sorted(several, key=lambda alike: alike[0].path.count("."))
