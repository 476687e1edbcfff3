"""Lists the ops inside of compiled code, and the kernels that inductor made of them."""

from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import chain
from typing import Any

import numpy as np

from ...recording.phase import BACKWARD, FORWARD
from ...recording.protocols import RecordingData
from ..tables.columns import column_of
from ..tables.placement import read_modules
from .compilations import name_module


@dataclass(frozen=True, kw_only=True)
class CompiledKernel:
    """Ops that run at once inside of compiled code: several that inductor fused, or a single one."""

    name: str  # `cpp_fused_gelu_view_2`, or the name of the op
    phase: str
    ops: tuple[str, ...]
    modules: tuple[str, ...]  # the modules of the ops; those of ops listed in earlier kernels come last
    is_fused: bool


@dataclass(frozen=True, kw_only=True)
class CompiledInside:
    """The ops inside of a compiled region, by one of its compilations that ran in the shown step."""

    name: str  # the path of the compiled module, a root's class, or the name of a function
    step: int  # the step in which it was compiled
    forward_ops: int
    backward_ops: int
    kernels: tuple[CompiledKernel, ...]  # in the order of the graphs, without views

    @property
    def is_fused(self) -> bool:
        """Whether inductor made kernels of the ops; otherwise they run one by one."""
        return any(kernel.is_fused for kernel in self.kernels)


def read_compiled(
    data: RecordingData, *, step: int | None, phase: str | None
) -> tuple[CompiledInside, ...] | None:
    """Returns the compiled regions whose inner ops were recorded; None if there are none.

    Args:
        data: the recording.
        step: the step in which regions must have run; None if there is no step.
        phase: the only phase whose kernels are listed; None for both.
    """
    if not data.table("compiled_ops").num_rows:
        return None
    names = _name_modules(data)
    ops_of: dict[int, list[dict[str, Any]]] = defaultdict(list)
    for op in data.table("compiled_ops").to_pylist():
        ops_of[op["compilation_id"]].append(op)
    ran = {
        run["compile_id"] for run in data.table("compiled_runs").to_pylist() if step in (None, run["step"])
    }
    regions = []
    for row in data.table("compilations").to_pylist():
        ops = ops_of.get(row["compilation_id"], [])
        if not ops or row["compile_id"] not in ran:
            continue
        by_phase = {one: [op for op in ops if op["phase"] == one] for one in (FORWARD, BACKWARD)}
        kernels = (_find_kernels(by_phase[one], names) for one in by_phase if phase in (None, one))
        regions.append(
            CompiledInside(
                name=names.get(row["module_id"]) or row["function"] or "a function",
                step=row["step"],
                forward_ops=len(by_phase[FORWARD]),
                backward_ops=len(by_phase[BACKWARD]),
                kernels=tuple(chain.from_iterable(kernels)),
            )
        )
    return tuple(regions) or None


def find_compiled_before(data: RecordingData, *, step: int | None) -> tuple[str, ...] | None:
    """Returns the modules that ran as compiled code in a step, if no ops inside of any compiled code were recorded."""
    if data.table("compiled_ops").num_rows or step is None:
        return None
    calls = data.table("calls")
    has_run = (column_of(calls, "compiled") == 1) & (column_of(calls, "step") == step)
    module_ids = set(np.unique(column_of(calls, "module_id")[has_run]).tolist())
    names = dict.fromkeys(name for number, name in _name_modules(data).items() if number in module_ids)
    return tuple(names) or None


def _name_modules(data: RecordingData) -> dict[int, str]:
    modules = read_modules(data)
    return {module_id: name_module(module) for module_id, module in modules.items()}


def _find_kernels(ops: list[dict[str, Any]], names: Mapping[int, str]) -> Iterator[CompiledKernel]:
    """Yields the kernels of one graph, each at the first of its ops that is in no earlier kernel."""
    members: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for number, op in enumerate(sorted(ops, key=lambda op: op["nth"])):
        own = [] if op["is_view"] else [f"{number} {op['name']}"]
        for name in op["kernels"] or own:
            members[name].append(op)
    seen: set[int] = set()
    for name, in_graph in members.items():
        in_kernel = sorted(in_graph, key=lambda op: op["nth"] in seen)
        seen.update(op["nth"] for op in in_kernel)
        modules = (names[op["module_id"]] for op in in_kernel if op["module_id"] in names)
        is_fused = bool(in_graph[0]["kernels"])
        yield CompiledKernel(
            name=name if is_fused else in_graph[0]["name"],
            phase=in_graph[0]["phase"],
            ops=tuple(op["name"] for op in in_kernel),
            modules=tuple(dict.fromkeys(modules)),
            is_fused=is_fused,
        )
