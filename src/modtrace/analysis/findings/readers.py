"""Finds which ops made what other ops read, and which read what a module returns, if ops were recorded."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from ...recording.phase import FORWARD
from ...recording.suggestions import count_of
from ..tables.columns import Column, column_of, find_rows, take
from ..tables.ops import bare_name
from ..tables.placement import Module, read_modules
from ..tables.sampled_steps import SampledSteps
from .places import place_of_module

#: The largest number of views that are followed from an op or module to another op.
_MOST_VIEWS = 8

_DETACHES, _SHOWN = "detach", 2

_COLUMNS = ("op_id", "call_id", "phase", "name", "is_view", "source")


def find_makers(run: SampledSteps, op_id: Column, slot: str) -> Iterator[Column]:
    """Yields for each op the op that made what it reads in a slot; where that is a view, then what made what it views.

    -1 stands for none.
    """
    reader = op_id
    for _ in range(_MOST_VIEWS):
        tensor = find_read(run, reader, slot)
        tensors = run.find("tensors", ["tensor_id", "producer_op"], tensor_id=tensor)
        maker = take(column_of(tensors, "producer_op"), find_rows(column_of(tensors, "tensor_id"), tensor))
        yield maker
        ops = run.find("ops", ["op_id", "is_view"], op_id=maker)
        is_view = (
            take(column_of(ops, "is_view").astype(np.int64), find_rows(column_of(ops, "op_id"), maker)) == 1
        )
        reader, slot = np.where(is_view, maker, -1), "self"
        if not is_view.any():
            return


def find_read(run: SampledSteps, op_id: Column, slot: str) -> Column:
    """Returns the tensor that each op reads in a slot; -1 for none."""
    uses = run.find("uses", ["consumer_op", "slot", "tensor_id"], consumer_op=op_id)
    is_one = np.array([used == slot for used in uses["slot"].to_pylist()], bool)
    return take(
        column_of(uses, "tensor_id")[is_one], find_rows(column_of(uses, "consumer_op")[is_one], op_id)
    )


def describe_readers(run: SampledSteps, module: Module, steps: Column) -> tuple[str, str] | None:
    """Returns what reads the output of a module in the newest of the steps that called it, and what to do about it.

    It is None if no ops were recorded of that step.
    """
    modules = read_modules(run.data)
    own = [number for number, one in modules.items() if one.module_id == module.module_id]
    calls = run.find("calls", ["step", "module_id"], step=steps)
    called = column_of(calls, "step")[np.isin(column_of(calls, "module_id"), own)]
    step = np.unique(called)[-1:]
    if not len(run.find("ops", ["op_id"], step=step)):
        return None
    name = place_of_module(run, module.module_id).name
    readers = _find_readers(run, own, step)
    detaching = [op for op in readers if bare_name(op["name"]) == _DETACHES]
    if detaching:
        return (
            f"what {name} returns is detached: {_describe(run, detaching[0])}",
            "leave that detach() out, or take the parameters out of the optimizer if it is meant",
        )
    if not readers:
        return f"no op reads what {name} returns", "use what it returns, or leave the module out"
    more = f" and {count_of(len(readers) - _SHOWN, 'further op')}" if len(readers) > _SHOWN else ""
    shown = ", ".join(_describe(run, op) for op in readers[:_SHOWN])
    return (
        f"what {name} returns is read by {shown}{more}",
        "see what becomes of it there: no_grad(), .data, .item(), argmax and comparisons pass no gradient",
    )


def _find_readers(run: SampledSteps, own: Sequence[int], step: Column) -> list[Mapping[str, Any]]:
    """Returns the ops of a forward outside of a module that read what was made inside, or a view of that, in order.

    Args:
        own: the ids of the module and of what it wraps.
    """
    calls = run.find("calls", ["call_id", "module_id", "parent_call_id"], step=step).to_pylist()
    inside = set[int]()
    for call in calls:
        if call["module_id"] in own or call["parent_call_id"] in inside:
            inside.add(call["call_id"])
    ops = {op["op_id"]: op for op in run.find("ops", _COLUMNS, step=step).to_pylist()}
    made_by = [op_id for op_id, op in ops.items() if op["call_id"] in inside]
    found: dict[int, Mapping[str, Any]] = {}
    for _ in range(_MOST_VIEWS):
        made = run.find("tensors", ["tensor_id"], producer_op=np.array(made_by, np.int64))
        uses = run.find("uses", ["consumer_op"], tensor_id=column_of(made, "tensor_id"))
        readers = [ops[op_id] for op_id in np.unique(column_of(uses, "consumer_op")).tolist() if op_id in ops]
        new = [op for op in readers if op["call_id"] not in inside and op["op_id"] not in found]
        new = [op for op in new if op["phase"] in (None, FORWARD)]
        found.update((op["op_id"], op) for op in new)
        made_by = [op["op_id"] for op in new if op["is_view"] and bare_name(op["name"]) != _DETACHES]
        if not made_by:
            break
    in_order = [found[op_id] for op_id in sorted(found)]
    return [op for op in in_order if not op["is_view"] or bare_name(op["name"]) == _DETACHES] or in_order


def _describe(run: SampledSteps, op: Mapping[str, Any]) -> str:
    call = np.array([-1 if op["call_id"] is None else op["call_id"]])
    calls = run.find("calls", ["call_id", "module_id"], call_id=call).to_pylist()
    where = f" in {place_of_module(run, calls[0]['module_id']).name}" if calls else " outside of modules"
    return f"{op['name']}{where}" + (f" at {op['source']}" if op["source"] else "")
