"""Compares the clock of a device with the host's clock, and converts times between them."""

import time
from collections import deque
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from ...torch_internals.device_events import TorchEvents

#: The largest number of comparisons that are kept, which covers the last hour of a recording in memory.
_KEPT = 4096

#: The number of attempts for a comparison, of which the shortest counts, as another thread may run in between.
_TRIES = 3

#: How long the first comparison, and each later one, may wait for work that the device already has.
_FIRST_PATIENCE_NS, _PATIENCE_NS = 1_000_000_000, 200_000

#: Comparisons that took longer than this are ignored, as clocks drift by at most 20 us a second.
_LONGEST_NS = 100_000

#: The shortest time between comparisons, which keeps their errors small relative to it.
_APART_NS = 100_000_000

_SPINS = 50


class _Comparison(NamedTuple):
    event: Any
    before_ns: int  # the event passed between these two host times
    after_ns: int

    @property
    def length_ns(self) -> int:
        return self.after_ns - self.before_ns


class DeviceClock:
    """The clock of one device, in nanoseconds since a first event, with its relation to the host's clock.

    An event recorded on a stream without other work passes about 10 us later, whatever other streams do. Half of that
    is the error of a converted time. Between two comparisons the clocks are assumed to drift evenly, so a conversion
    keeps the order of times. CUDA gives the time between two events as a 32-bit float, so times are counted from the
    last compared event.
    """

    def __init__(self, events: TorchEvents, device: int) -> None:
        """Compares the clocks for the first time, which waits at most a second for work that the device already has."""
        self.device = device
        self._events = events
        self._reference: Any = None
        self._reference_ns = 0.0
        self._spare: list[Any] = []
        self._known: deque[tuple[float, float]] = deque(maxlen=_KEPT)  # pairs of device time and host time
        self._compared_ns = 0
        self._take(self._compare(_FIRST_PATIENCE_NS), longest_ns=_FIRST_PATIENCE_NS)
        if self._reference is None:  # it will pass before every event that is read
            self._reference = self._spare.pop()

    def compare(self) -> None:
        """Compares the clocks again, unless that was done just now. It takes 50 us, and never waits for the program.

        Nothing changes if the device does not answer at once, as when `CUDA_DEVICE_MAX_CONNECTIONS` makes all streams
        share one queue.
        """
        if time.perf_counter_ns() - self._compared_ns >= _APART_NS:
            self._take(self._compare(_PATIENCE_NS), longest_ns=_LONGEST_NS)

    def read(self, event: Any) -> float:
        """Returns the time of an event that has passed, on the clock of the device.

        Raises:
            RuntimeError: the device has failed.
        """
        return self._reference_ns + self._events.elapsed_ns(self._reference, event)

    def to_host(self, times_ns: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
        """Returns device times as host times; NaN if the clocks could not be compared."""
        if not self._known:
            return np.full(len(times_ns), np.nan)
        device, host = np.array(self._known).T
        # Outside of the known comparisons, both clocks are assumed to run at the same speed.
        converted: npt.NDArray[np.float64] = times_ns + np.interp(times_ns, device, host - device)
        return converted

    def _compare(self, patience_ns: int) -> list[_Comparison]:
        """Returns new comparisons; none if the device did not answer in time."""
        found: list[_Comparison] = []
        while len(found) < _TRIES:
            spare = self._spare.pop() if self._spare else None
            before_ns = time.perf_counter_ns()
            event = self._events.record_aside(spare, self.device)
            if not self._has_passed(event, before_ns + patience_ns):
                self._spare.append(event)
                break
            found.append(_Comparison(event, before_ns, time.perf_counter_ns()))
        return found

    def _has_passed(self, event: Any, until_ns: int) -> bool:
        for _ in range(_SPINS):
            if self._events.has_passed(event):
                return True
        while time.perf_counter_ns() < until_ns:
            time.sleep(2e-5)
            if self._events.has_passed(event):
                return True
        return False

    def _take(self, found: list[_Comparison], *, longest_ns: int) -> None:
        """Adds the best comparison, and counts device times from its event."""
        self._compared_ns = time.perf_counter_ns()
        found.sort(key=lambda comparison: comparison.length_ns)
        self._spare += [comparison.event for comparison in found[1:]]
        if not found:
            return
        best = found[0]
        if self._reference is not None:
            self._reference_ns = self.read(best.event)
            self._spare.append(self._reference)
        self._reference = best.event
        if best.length_ns <= longest_ns:
            self._known.append((self._reference_ns, (best.before_ns + best.after_ns) / 2))
