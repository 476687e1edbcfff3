"""Finds the op of an earlier step that made the NaN or infinite values of a tensor which a later step reads."""

from functools import lru_cache, partial
from typing import NamedTuple

import numpy as np

from ..tables.columns import column_of
from ..tables.indexed_tables import IndexedTables
from ..tables.one_step import OneStep
from ..values.nonfinite import SOURCE
from .earlier_steps import EarlierSteps
from .step_counts import StepCounts
from .trace import trace_step
from .traced import Origin, Trace

#: The largest number of earlier steps that are traced again, and kept for the next question.
_MOST_STEPS, _KEPT = 8, 2


class Maker(NamedTuple):
    """The op that made non-finite values in an earlier step."""

    trace: Trace
    event: Origin


class Makers:
    """Traces the ops of earlier steps, as far as they were recorded."""

    def __init__(self, run: IndexedTables, earlier: EarlierSteps) -> None:
        """Starts without reading any step; `earlier` holds what is known of dropped steps."""
        self._run = run
        self._trace = lru_cache(maxsize=_KEPT)(partial(_trace_step, run, earlier))

    def find(self, tensor_id: int, before: int) -> Maker | None:
        """Returns what made the values that a tensor held at the end of its op's step; None if that is not known.

        Args:
            tensor_id: the id of the tensor that held the values.
            before: the step that reads it.
        """
        for _ in range(_MOST_STEPS):
            writer = self._run.find_writer(tensor_id)
            trace = self._trace(writer["step"]) if writer is not None and writer["step"] < before else None
            if trace is None:
                return None
            before, tensors = trace.step.number, trace.step.tensors
            [tensor] = np.flatnonzero(tensors.tensor_id == tensor_id).tolist()
            event = next(iter(trace.select(trace.memory.read(tensor).events)), None)
            if event is None:
                return None
            if event.kind != SOURCE:
                return Maker(trace, event)
            tensor_id = int(tensors.tensor_id[event.tensor])
        return None


def _trace_step(run: IndexedTables, earlier: EarlierSteps, number: int) -> Trace | None:
    step = OneStep(run, number)
    counts = StepCounts(step, earlier)
    return None if counts.has_lost_rows else trace_step(step, counts)


def is_read_later(trace: Trace, event: Origin) -> bool:
    """Returns whether an op of a later step reads a tensor that holds the event's values, so that step decides."""
    own, memory, run = 1 << trace.numbers[event], trace.memory, trace.step.run
    tensors = [event.tensor, *(tensor for tensor, events in trace.unread_tensors if events & own)]
    held = [tensor for tensor in tensors if memory.read(tensor).events & own]
    written = {(memory.storage_of(tensor), int(trace.step.versions[tensor])) for tensor in held}
    storages = np.array(sorted(storage for storage, _ in written), np.int64)
    rows = run.find("tensors", ["tensor_id", "storage", "version"], storage=storages).to_pylist()
    shown = [row["tensor_id"] for row in rows if (row["storage"], row["version"] or 0) in written]
    uses = run.find("uses", ["consumer_op"], tensor_id=np.array(shown, np.int64))
    return bool((column_of(uses, "consumer_op") > trace.step.ops.op_id.max()).any())
