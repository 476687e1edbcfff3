"""Lists the ops inside of compiled code, and the kernels that inductor made of them."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import pyarrow.compute as pc

from ...recording.arrow.arrays import from_numpy
from ...recording.phase import BACKWARD, FORWARD
from ...recording.protocols import RecordingData
from ..tables.columns import column_of
from ..tables.placement import merge_wrappers


@dataclass(frozen=True, kw_only=True)
class CompiledKernel:
    """What runs at once inside of compiled code: ops that inductor has fused, or one op by itself."""

    name: str  # `cpp_fused_gelu_view_2`, or that of the op
    phase: str
    ops: tuple[str, ...]
    modules: tuple[str, ...]  # whose ops these are; last those whose ops were in earlier ones
    is_fused: bool


@dataclass(frozen=True, kw_only=True)
class CompiledInside:
    """A compiled region, as one compilation of it that ran in the step that is shown."""

    name: str  # the path of the compiled module, of a root its class; of a function its name
    step: int  # in which it was compiled
    forward_ops: int
    backward_ops: int
    kernels: tuple[CompiledKernel, ...]  # without views, in the order of the graphs

    @property
    def is_fused(self) -> bool:
        """Whether inductor has made kernels of its ops; else they run one by one."""
        return any(kernel.is_fused for kernel in self.kernels)


def read_compiled(
    data: RecordingData, *, step: int | None, phase: str | None
) -> tuple[CompiledInside, ...] | None:
    """Returns the compiled regions of which the ops were recorded; None if there are none.

    Args:
        data: the recording.
        step: what did not run in it is left out; None for nothing.
        phase: leaves out the kernels of the other one; None for both.
    """
    table = data.table("compiled_ops")
    if not table.num_rows:
        return None
    names = _name_modules(data)
    with_ops = set(pc.unique(table["compilation_id"]).to_pylist())
    ran = _find_ran(data, step)
    found = []
    for row in data.table("compilations").to_pylist():
        if row["compilation_id"] not in with_ops or row["compile_id"] not in ran:
            continue
        ops = table.filter(
            from_numpy(column_of(table, "compilation_id") == row["compilation_id"])
        ).to_pylist()
        counts = [sum(op["phase"] == each for op in ops) for each in (FORWARD, BACKWARD)]
        kernels = [
            kernel
            for each in (FORWARD, BACKWARD)
            if phase in (None, each)
            for kernel in _kernels([op for op in ops if op["phase"] == each], names)
        ]
        found.append(
            CompiledInside(
                name=names.get(row["module_id"]) or row["function"] or "a function",
                step=row["step"],
                forward_ops=counts[0],
                backward_ops=counts[1],
                kernels=tuple(kernels),
            )
        )
    return tuple(found) or None


def _find_ran(data: RecordingData, step: int | None) -> set[str]:
    """Returns the compile ids of what ran in a step, or in any."""
    runs = data.table("compiled_runs")
    if step is not None:
        runs = runs.filter(from_numpy(column_of(runs, "step") == step))
    return set(runs["compile_id"].to_pylist())


def find_compiled_before(data: RecordingData, *, step: int | None) -> tuple[str, ...] | None:
    """Returns the modules that ran as compiled code in a step, if no ops inside of any compiled code were recorded."""
    if data.table("compiled_ops").num_rows:
        return None
    calls = data.table("calls")
    has_run = (column_of(calls, "compiled") == 1) & (
        column_of(calls, "step") == (-1 if step is None else step)
    )
    module_ids = set(column_of(calls, "module_id")[has_run].tolist())
    found = dict.fromkeys(name for each, name in _name_modules(data).items() if each in module_ids)
    return tuple(found) or None


def _name_modules(data: RecordingData) -> dict[int, str]:
    """Returns the path of each module, of a root its name, by id."""
    modules = merge_wrappers(data.table("modules").to_pylist())
    return {each: module.path or module.name or module.type for each, module in modules.items()}


def _kernels(ops: list[dict[str, Any]], names: Mapping[int, str]) -> Iterator[CompiledKernel]:
    """Yields the kernels of one graph, each where its first op stands that is in no earlier one."""
    members: dict[str, list[dict[str, Any]]] = {}
    for at, op in enumerate(sorted(ops, key=lambda each: each["nth"])):
        alone = [] if op["is_view"] else [f"{at} {op['name']}"]
        for name in op["kernels"] or alone:
            members.setdefault(name, []).append(op)
    seen: set[int] = set()
    for name, of_kernel in members.items():
        is_fused = bool(of_kernel[0]["kernels"])
        of_kernel = sorted(of_kernel, key=lambda each: each["nth"] in seen)
        seen.update(each["nth"] for each in of_kernel)
        modules = (names[each["module_id"]] for each in of_kernel if each["module_id"] in names)
        yield CompiledKernel(
            name=name if is_fused else of_kernel[0]["name"],
            phase=of_kernel[0]["phase"],
            ops=tuple(each["name"] for each in of_kernel),
            modules=tuple(dict.fromkeys(modules)),
            is_fused=is_fused,
        )
