"""Turns the ops of ended steps into the columns of the tables `ops`, `tensors` and `uses`."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import torch

from ..recording.arrays import from_numpy, from_strings
from .call_rows import count_before
from .joined_ops import JoinedOps
from .op_args import Arguments
from .op_batches import OpBatch
from .op_calls import OpCalls
from .op_flops import OpFlops
from .op_mode import ACCUMULATES, ADDING, END_NS, FLAGS, NOT_ADDING, OP, PLAN, RAISED, START_NS, OpMode
from .op_nodes import OpNodes
from .segments import Ints
from .steps import Step
from .tensor_ids import REQUIRES_GRAD, TensorIds

#: So many different sets of arguments are remembered with their texts.
_KEPT = 32768

Columns = dict[str, Any]


class OpTables:
    """Makes rows of ops; remembers from step to step what they have in common."""

    def __init__(self, mode: OpMode, nodes: OpNodes) -> None:
        self._mode = mode
        self._nodes = nodes
        self._flops = OpFlops()
        self._texts: dict[Arguments, tuple[str, tuple[str, ...]]] = {}

    def of(self, steps: Sequence[Step], optimizer_ids: Sequence[int]) -> dict[str, Columns]:
        """The columns of each table; only tables with rows are there.

        Args:
            optimizer_ids: the call ids of the optimizer steps in these steps, in order.
        """
        batches: list[OpBatch] = [batch for step in steps for batch in step.ops]
        if not batches:
            return {}
        found = JoinedOps(batches)
        texts = [self._texts_of(each) for each in found.arguments]
        calls = OpCalls(found, steps, optimizer_ids)
        counts = [sum(map(len, step.ops)) for step in steps]
        step = np.repeat(np.array([each.number for each in steps], np.int32), counts)
        tables = {
            "ops": self._op_columns(found, step, calls, [template for template, _ in texts]),
            "uses": _use_columns(found, [slots for _, slots in texts]),
            "tensors": _tensor_columns(found, self._mode.ids),
        }
        return {table: columns for table, columns in tables.items() if len(next(iter(columns.values())))}

    def _texts_of(self, arguments: Arguments) -> tuple[str, tuple[str, ...]]:
        texts = self._texts.get(arguments)
        if texts is None:
            if len(self._texts) >= _KEPT:
                self._texts = {}
            texts = self._texts[arguments] = arguments.texts()
        return texts

    def _op_columns(
        self,
        found: JoinedOps,
        step: npt.NDArray[np.int32],
        calls: OpCalls,
        templates: Sequence[str],
    ) -> Columns:
        events, plans = found.events, self._mode.plans
        plan = events[:, PLAN]
        nodes = self._nodes.of(found, np.array([each.writes for each in plans], bool))
        sizes = np.array([each.size_bytes for each in self._mode.ids.geometries], np.int64)
        is_view = np.array([each.is_view for each in plans], bool)[plan] & ~found.has_allocated()
        return {
            "op_id": events[:, OP],
            "step": step,
            "call_id": _null(calls.call_id),
            "phase": _null(calls.phase),
            "name": _words(plan, [each.name for each in plans]),
            "nth": count_before(_place_key(step, calls), plan),
            "args": _words(found.argument, templates),
            "sequence_nr": _null(nodes.node),
            "sequence_thread": np.ma.masked_array(nodes.thread, nodes.node < 0),
            "forward_op_id": _null(nodes.forward_op),
            "thread": calls.thread,
            "is_view": is_view,
            "start_ns": events[:, START_NS],
            "end_ns": events[:, END_NS],
            "flops": _null(self._flops.of(found, plans, self._mode.ids.geometries)),
            "bytes_read": np.where(is_view, 0, found.sum_of_uses(sizes)),
            "bytes_written": np.where(is_view, 0, found.sum_of_outputs(sizes)),
            "raised": (events[:, FLAGS] & RAISED) != 0,
            "accumulation": _accumulation(events, [each.name for each in plans]),
        }


def _use_columns(found: JoinedOps, slots: Sequence[tuple[str, ...]]) -> Columns:
    return {
        "consumer_op": np.repeat(found.events[:, OP], found.use_counts),
        "slot": [slot for at in found.argument.tolist() for slot in slots[at]],
        "tensor_id": found.used[:, 0],
    }


def _tensor_columns(found: JoinedOps, ids: TensorIds) -> Columns:
    rows, geometries = found.tensors, ids.geometries
    storage, version, offset, geometry, device, producer, slot, bits = rows.T
    known, place = np.unique(geometry, return_inverse=True)
    shown = [geometries[at] for at in known.tolist()]
    at = place.tolist()
    return {
        "tensor_id": found.tensor_ids,
        "shape": [shown[each].shape for each in at],
        "stride": [shown[each].stride or () for each in at],
        "offset": offset,
        "conj": np.array([each.conj for each in shown], bool)[place],
        "neg": np.array([each.neg for each in shown], bool)[place],
        "dtype": _words(place, [_word(each.dtype) for each in shown]),
        "device": _words(device, [str(each) for each in ids.devices]),
        "layout": _words(place, [_word(each.layout) for each in shown]),
        "requires_grad": (bits & REQUIRES_GRAD) != 0,
        "storage": _null(storage),
        "version": np.ma.masked_array(version, storage < 0),
        "producer_op": _null(producer),
        "slot": [ids.slots[each] for each in slot.tolist()],
    }


def _place_key(step: npt.NDArray[np.int32], calls: OpCalls) -> Ints:
    """Equal where ops are told apart by name and number alone: in a call, or in a phase of a step outside of calls."""
    outside = -1 - (step.astype(np.int64) * 8 + calls.phase + 1)
    key: Ints = np.where(calls.call_id >= 0, calls.call_id, outside)
    return key


def _accumulation(events: Ints, names: Sequence[str]) -> Any:
    """Whether the engine has added gradients that meet; masked: not known."""
    flags = events[:, FLAGS]
    is_addition = np.array([name.startswith("aten.add") for name in names], bool)
    accumulates = (flags & ACCUMULATES) != 0
    adds = ((flags & ADDING) != 0) | (accumulates & is_addition[events[:, PLAN]])
    return np.ma.masked_array(adds, ((flags & (ADDING | NOT_ADDING)) == 0) & ~accumulates)


def _null(values: Any) -> Any:
    return np.ma.masked_array(values, values < 0)


def _words(codes: Ints, words: Sequence[str]) -> pa.DictionaryArray:
    """A column of words of which only those that are there are kept; `words` may hold one twice."""
    used, back = np.unique(codes, return_inverse=True)
    numbers: dict[str, int] = {}
    new = np.array([numbers.setdefault(words[code], len(numbers)) for code in used.tolist()], np.int32)
    return pa.DictionaryArray.from_arrays(from_numpy(new[back], pa.int32()), from_strings([*numbers]))


def _word(value: torch.dtype | torch.layout) -> str:
    return str(value).removeprefix("torch.")
