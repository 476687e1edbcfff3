"""Finds the op of an earlier step that made the NaN or infinite values of a tensor which a later step reads."""

from functools import lru_cache
from itertools import chain
from typing import NamedTuple

import numpy as np

from ..tables.columns import column_of
from ..values.nonfinite import SOURCE
from .earlier_steps import EarlierSteps
from .indexed_tables import IndexedTables
from .step_counts import StepCounts
from .step_flow import read_step_flow
from .trace import Origin, Trace, trace_step

#: The number of earlier steps at most whose ops are followed again, and kept for the next question.
_MOST_STEPS, _KEPT = 8, 2


class Maker(NamedTuple):
    """What made values in an earlier step."""

    step: int
    trace: Trace
    event: Origin


class Makers:
    """Follows the ops of earlier steps, as far as they were recorded."""

    def __init__(self, tables: IndexedTables, earlier: EarlierSteps) -> None:
        """Reads nothing before it is asked; `earlier` is what is known of dropped steps."""
        self._tables = tables
        self._earlier = earlier
        self._trace = lru_cache(maxsize=_KEPT)(self._read)

    def find(self, tensor_id: int, before: int) -> Maker | None:
        """Returns what made the values that a tensor held when the step of its op ended; None if that is not known.

        Args:
            tensor_id: the tensor.
            before: the step that reads it.
        """
        for _ in range(_MOST_STEPS):
            writer = self._tables.find_writer(tensor_id)
            if writer is None or writer["step"] >= before:
                return None
            before = int(writer["step"])
            trace = self._trace(before)
            if trace is None:
                return None
            tensors = trace.flow.tensors
            [tensor] = np.flatnonzero(tensors.tensor_id == tensor_id).tolist()
            origins = trace.memory.look(tensor).origins
            if not origins:
                return None
            event = trace.events[min(origins)]
            if event.kind != SOURCE:
                return Maker(before, trace, event)
            tensor_id = int(tensors.tensor_id[event.tensor])
        return None

    def _read(self, step: int) -> Trace | None:
        data = self._tables.of_step(step)
        flow = read_step_flow(data, step)
        counts = StepCounts(self._tables, data, flow, self._earlier)
        return None if counts.has_lost_rows else trace_step(self._tables, flow, counts)


def is_read_later(tables: IndexedTables, trace: Trace, event: Origin) -> bool:
    """Returns whether an op of a later step reads what holds the values: that step tells what became of them."""
    number, memory = trace.events.index(event), trace.memory
    tensors = [event.tensor, *chain.from_iterable(event.unread.values())]
    held = [tensor for tensor in tensors if number in memory.look(tensor).origins]
    written = {(memory.storage_of(tensor), trace.flow.versions[tensor]) for tensor in held}
    storages = np.array(sorted(storage for storage, _ in written), np.int64)
    rows = tables.find("tensors", ["tensor_id", "storage", "version"], storage=storages).to_pylist()
    shown = [row["tensor_id"] for row in rows if (row["storage"], row["version"] or 0) in written]
    uses = tables.find("uses", ["consumer_op"], tensor_id=np.array(shown, np.int64))
    readers = column_of(uses, "consumer_op")
    return bool((readers > trace.flow.ops.op_id.max()).any())
