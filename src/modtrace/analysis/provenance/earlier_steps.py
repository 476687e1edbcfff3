"""Remembers of the steps of a run, which are looked at one by one and dropped, what later ones may read."""

from dataclasses import dataclass, field

import numpy as np

from ...recording.protocols import RecordingData
from ..step.calls import column_of
from .memory import BAD, CLEAN
from .trace import Trace

#: As many tensors at most are remembered: the last ones.
_MOST_TENSORS = 100_000


@dataclass
class EarlierSteps:
    """The tensors of dropped steps that are not known to be finite, by id."""

    is_complete: bool = False  # all that ops return is measured in every step
    #: What made the values that a tensor held when its step ended; None: it held infinities that are meant.
    _held: dict[int, str | None] = field(default_factory=dict)
    _unsearched: list[tuple[int, int]] = field(
        default_factory=list
    )  # the first and last id of steps in a row

    def is_finite(self, tensor_id: int) -> bool:
        """Returns whether a tensor was finite when its step ended, which is over and was looked at."""
        is_unsearched = any(first <= tensor_id <= last for first, last in self._unsearched)
        return self.is_complete and tensor_id not in self._held and not is_unsearched

    def describe(self, tensor_id: int) -> str | None:
        """Returns what made the values that a tensor held: `log in Net made it in step 3`; None if nothing is known."""
        return self._held.get(tensor_id)

    def note(self, trace: Trace, step: int) -> None:
        """Remembers what the tensors of a step hold at its end."""
        if not self.is_complete:
            return
        for tensor, tensor_id in enumerate(trace.flow.tensors.tensor_id.tolist()):
            state = trace.memory.look(tensor)
            if state.kind == CLEAN:
                self._held.pop(tensor_id, None)
                continue
            by = trace.events[min(state.origins)].op if state.kind == BAD else None
            self._held[tensor_id] = (
                None if by is None else f"{trace.flow.describe_op(by)} made it in step {step}"
            )
        for tensor_id in list(self._held)[:-_MOST_TENSORS]:
            del self._held[tensor_id]

    def skip(self, data: RecordingData) -> None:
        """Remembers that nobody has followed the ops of a step, which may hold such values."""
        if not self.is_complete:
            return
        ids = column_of(data.table("tensors"), "tensor_id")
        made = ids[
            np.isin(column_of(data.table("tensors"), "producer_op"), column_of(data.table("ops"), "op_id"))
        ]
        if not len(made):
            return
        first, last = int(made.min()), int(made.max())
        if self._unsearched and first <= self._unsearched[-1][1] + 1:
            first, _ = self._unsearched.pop()
        self._unsearched.append((first, last))
