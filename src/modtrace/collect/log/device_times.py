"""Records when a device reaches the beginnings and ends of calls, backwards, optimizer steps and ops."""

import threading
import time
from collections import deque
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
from torch import nn

from ...torch_internals.device_events import TorchEvents
from ...torch_internals.dynamo import keep_out_of_dynamo
from ...torch_internals.graph_captures import graph_captures
from .call_context import CallContext
from .device_clock import DeviceClock
from .listeners import Listener, Subscribers
from .thread_log import ThreadLog

#: The largest number of events of a device that may wait; later calls have no times.
_MOST_EVENTS = 65_536

#: When this many events exist, passed events are read before another one is made.
_MANY_EVENTS = 8_192

#: A step's times are given up if the device has passed no event for this long.
_PATIENCE_S = 10.0


class DeviceEvent:
    """An event recorded on a stream, and its time once it was read."""

    __slots__ = ("clock", "event", "stream", "time_ns")

    def __init__(self, clock: DeviceClock, event: Any, stream: int) -> None:
        self.clock = clock
        self.stream = stream
        self.event = event  # None once it was read, as events are reused
        self.time_ns = np.nan  # on the clock of the device; NaN until it is known


class SegmentEvents:
    """The device events of the calls of one segment."""

    __slots__ = ("by_event", "open")

    def __init__(self) -> None:
        self.by_event: dict[int, DeviceEvent] = {}  # keyed by the number of the log event in the segment
        self.open: list[tuple[CallContext, DeviceEvent | None]] = []  # running calls, with their first events


class _DeviceQueues:
    """The events of one device: the free ones, and those waiting to be passed, in order."""

    def __init__(self, clock: DeviceClock) -> None:
        self.clock = clock
        self.free: list[Any] = []
        self.made = 0
        #: Waiting events by thread and stream; each device passes those of one stream in order.
        self.waiting: dict[tuple[int, int], deque[DeviceEvent]] = {}


class DeviceTimes(Listener):
    """Records device events while a user wants device times. Only `read` waits for a device.

    One event is recorded just before the first kernel of a call is issued, and another after its last one, both on the
    current stream of the device that the call works on. Both together take 8 us a call on a shared 2-core machine with
    events that do nothing; those of CUDA add 2 to 4 us (estimated: no GPU has run it).
    """

    def __init__(self, subscribers: Subscribers) -> None:
        self.is_on = False
        self._subscribers = subscribers
        self.failure: Exception | None = None  # the error after which no times are taken
        self._users: set[object] = set()
        self._events = TorchEvents()
        self._queues: dict[int, _DeviceQueues] = {}  # keyed by device
        self._optimizers: dict[int, list[DeviceEvent | None]] = {}  # by thread: of the last optimizer step
        self._opening = threading.Lock()
        self._reading = threading.Lock()

    def start(self, user: object) -> None:
        """Takes times for one more user, until `stop(user)`."""
        self._users.add(user)
        if len(self._users) == 1:
            keep_out_of_dynamo(DeviceTimes.entering, DeviceTimes.leaving)
            graph_captures.watch(self)
            graph_captures.add(self)
            # Times exclude what other listeners do.
            self._subscribers.add(self, "entering", "before_optimizer")
            self._subscribers.add(self, "leaving", "after_optimizer", first=True)
        self.is_on = self.failure is None

    def stop(self, user: object) -> None:
        """Stops taking times for a user; recorded events can still be read."""
        was_used = bool(self._users)
        self._users.discard(user)
        if was_used and not self._users:
            self.is_on = False
            self._optimizers.clear()
            self._subscribers.remove(self)
            graph_captures.unwatch(self)

    # Recording; these methods never raise.

    def record(self, device: int) -> DeviceEvent | None:
        """Records an event on the current stream of a device.

        Returns:
            the event; None if `device` is -1, a CUDA graph is being captured, or too many events wait.
        """
        if device < 0 or not self.is_on or graph_captures.may_be_open:
            return None
        try:
            return self._record(device)
        except Exception as error:
            self._fail(error)
            return None

    def record_for(self, values: Iterable[object]) -> DeviceEvent | None:
        """Records an event on the current stream of the first device on which one of the values lies."""
        if not self.is_on or not self._events.is_in_use():
            return None
        try:
            device = self._events.device_of(values)
        except Exception:  # a user's class may raise
            return None
        return self.record(device)

    def _record(self, device: int) -> DeviceEvent | None:
        queues = self._queues.get(device) or self._open(device)
        stream = None if queues is None else self._events.current_stream(device)
        if queues is None or stream is None:
            return None
        try:
            event = queues.free.pop()  # an atomic operation
        except IndexError:
            event = self._new_event(queues, stream)
        else:
            self._events.record(event, device, stream)
        if event is None:
            return None
        recorded = DeviceEvent(queues.clock, event, stream)
        key = threading.get_ident(), stream
        waiting = queues.waiting.get(key)
        if waiting is None:
            waiting = queues.waiting[key] = deque()
        waiting.append(recorded)
        return recorded

    def _open(self, device: int) -> _DeviceQueues | None:
        """Returns the queues of a device that is new; None while a graph is captured."""
        with self._opening, graph_captures.device_work() as is_allowed:
            if is_allowed and device not in self._queues:
                self._queues[device] = _DeviceQueues(DeviceClock(self._events, device))
        return self._queues.get(device)

    def _new_event(self, queues: _DeviceQueues, stream: int) -> Any:
        """Returns a newly recorded event; None if there are too many."""
        event = None
        if queues.made >= _MANY_EVENTS:
            self._read_passed()
            event = queues.free.pop() if queues.free else None
        if event is None and queues.made >= _MOST_EVENTS:
            return None
        with graph_captures.device_work() as is_allowed:  # an event is created
            if not is_allowed:
                return None
            queues.made += event is None
            return self._events.record(event, queues.clock.device, stream)

    def _fail(self, error: Exception) -> None:
        self.failure, self.is_on = self.failure or error, False

    # Events of modules and optimizers.

    def entering(self, log: ThreadLog, module: nn.Module, args: Any) -> None:
        segment = log.segment
        if segment is None or log.context.outermost != id(module) or not self._events.is_in_use():
            return
        events: SegmentEvents | None = segment.device_events
        if events is None:
            events = segment.device_events = SegmentEvents()
        try:
            device = self._device_of_call(events, module, args)
        except Exception:  # a user's class may raise
            device = -1
        recorded = self.record(device)
        events.open.append((log.context, recorded))
        if recorded is not None:
            events.by_event[len(log.contexts) - 1] = recorded

    def leaving(
        self, log: ThreadLog, module: nn.Module, args: Any, kwargs: Any, output: Any, raised: bool
    ) -> None:
        events: SegmentEvents | None = None if log.segment is None else log.segment.device_events
        if events is None or log.context.outermost != id(module):
            return
        is_own = False
        while events.open and not is_own:  # calls whose exit hook never ran have no end
            context, began = events.open.pop()
            is_own = context is log.context
        if is_own and began is not None:
            ended = self.record(began.clock.device)
            if ended is not None:
                events.by_event[len(log.contexts)] = ended  # the call's exit will be the next event

    def _device_of_call(self, events: SegmentEvents, module: nn.Module, args: Any) -> int:
        """Returns the index of the device of a call: that of its first argument, its parameters, or its caller."""
        device_of = self._events.device_of
        device = device_of(args)
        if device < 0:
            device = device_of(module._parameters.values())
        if device < 0 and events.open:
            began = events.open[-1][1]
            return -1 if began is None else began.clock.device
        return device_of(module.parameters()) if device < 0 else device

    def before_optimizer(self, optimizer: Any, has_closure: bool) -> None:
        parameters = (parameter for group in optimizer.param_groups for parameter in group["params"])
        self._optimizers[threading.get_ident()] = [self.record_for(parameters)]

    def after_optimizer(self, optimizer: Any, has_closure: bool) -> None:
        events = self._optimizers.get(threading.get_ident())
        if events and events[0] is not None:
            events.append(self.record(events[0].clock.device))

    def optimizer_events(self) -> tuple[DeviceEvent | None, DeviceEvent | None]:
        """Returns the events of the optimizer that has just stepped on this thread."""
        began, ended, *_ = [*self._optimizers.get(threading.get_ident(), []), None, None]
        return began, ended

    # Reading events.

    def read(self, wanted: Iterable[DeviceEvent]) -> None:
        """Waits until devices have passed some events, and reads their times. It is never called during a step.

        An event that a device does not pass, or that cannot be read because a CUDA graph is being captured, keeps NaN.
        """
        waiting = list(wanted)
        clocks = {event.clock for event in waiting}
        pause_s, until_s = 2e-5, 0.0
        while self.failure is None:
            if self._read_passed() or not until_s:
                until_s = time.monotonic() + _PATIENCE_S
            while waiting and waiting[-1].event is None:  # events pass in order, so the last one decides
                waiting.pop()
            if not waiting or graph_captures.may_be_open or time.monotonic() > until_s:
                break
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, 1e-3)
        self._compare(clocks)

    def fetch(self) -> None:
        """Reads passed events because a capture begins; torch waits before it until devices are idle."""
        self._read_passed()

    def _compare(self, clocks: Iterable[DeviceClock]) -> None:
        with graph_captures.device_work() as is_allowed:
            if not is_allowed or self.failure is not None or not self._reading.acquire(blocking=False):
                return
            try:
                for clock in clocks:
                    clock.compare()
            except Exception as error:
                self._fail(error)
            finally:
                self._reading.release()

    def _read_passed(self) -> int:
        """Reads the events that devices have passed, unless another thread is reading; it never waits.

        Returns:
            how many events were read.
        """
        read = 0
        if self.failure is not None or not self._reading.acquire(blocking=False):
            return read
        try:
            with graph_captures.device_work() as is_allowed:
                for queues in list(self._queues.values()) if is_allowed else ():
                    read += sum(self._read_queue(queue, queues) for queue in list(queues.waiting.values()))
        except Exception as error:  # the device has failed
            self._fail(error)
        finally:
            self._reading.release()
        return read

    def _read_queue(self, waiting: deque[DeviceEvent], queues: _DeviceQueues) -> int:
        # One query takes 1 us, and if the newest event has passed, all have.
        count = len(waiting)
        have_passed = count > 0 and self._events.has_passed(waiting[count - 1].event)
        for number in range(count):
            first = waiting[0]
            if not have_passed and not self._events.has_passed(first.event):
                return number
            first.time_ns = queues.clock.read(first.event)
            waiting.popleft()
            event, first.event = first.event, None
            queues.free.append(event)
        return count


def times_between(
    began: Sequence[DeviceEvent | None], ended: Sequence[DeviceEvent | None]
) -> npt.NDArray[np.float64]:
    """Returns `[2, rows]`: beginnings and ends as host times; NaN where one is not known.

    The end is not known if it was recorded on another stream than the beginning.
    """
    times = np.array([_to_host(began), _to_host(ended)])
    strays = [
        first is not None and last is not None and (first.clock, first.stream) != (last.clock, last.stream)
        for first, last in zip(began, ended, strict=True)
    ]
    times[1, np.array(strays, bool)] = np.nan
    return times


def _to_host(events: Sequence[DeviceEvent | None]) -> npt.NDArray[np.float64]:
    times = np.array([np.nan if event is None else event.time_ns for event in events], np.float64)
    for clock in {event.clock for event in events if event is not None}:
        rows = [row for row, event in enumerate(events) if event is not None and event.clock is clock]
        times[rows] = clock.to_host(times[rows])
    return times
