"""Takes when a device works on each op."""

from collections.abc import Sequence
from typing import Any

from ..log.device_times import DeviceEvent, DeviceTimes
from ..steps.device_columns import EventPairs, add_time_columns, find_times
from ..steps.step import Step
from .schemas import OpSchema


class OpDeviceTimes:
    """Records an event before and behind each op that is given a tensor on a device; see `OpKeeper`."""

    def __init__(self, device_times: DeviceTimes) -> None:
        self._device_times = device_times
        self._events: EventPairs = {}

    def begins(self, op: int, schema: OpSchema, args: Any, kwargs: Any) -> None:
        """Receives an op that is about to run."""
        began = self._device_times.record_for((*args, *kwargs.values()))
        if began is not None:
            self._events[op] = began, None

    def ended(self, op: int, schema: OpSchema, output: Any) -> None:
        """Receives an op that has returned."""
        began: DeviceEvent | None = self._events.get(op, (None, None))[0]
        if began is not None:
            self._events[op] = began, self._device_times.record(began.clock.device)

    def take(self) -> EventPairs:
        """Returns the events of the ops since this was last called."""
        events, self._events = self._events, {}
        return events

    @staticmethod
    def add_times(columns: dict[str, Any], steps: Sequence[Step]) -> None:
        """Adds the times to the rows of the steps' ops."""
        events = {
            op: pair for step in steps for batch in step.ops for op, pair in batch.device_events.items()
        }
        times = find_times(columns["op_id"], events)
        if times is not None:
            add_time_columns(columns, times)
