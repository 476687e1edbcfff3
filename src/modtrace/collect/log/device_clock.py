"""Compares the clock of a device with that of the host, and converts times from one to the other."""

import time
from collections import deque
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from ...torch_internals.device_events import TorchEvents

#: At most this many comparisons are kept: the last hour of a recording in memory.
_KEPT = 4096

#: The shortest of this many comparisons counts: between two lines of Python another thread may run.
_TRIES = 3

#: How long the first comparison may wait for what the device does already, and every later one.
_FIRST_PATIENCE_NS, _PATIENCE_NS = 1_000_000_000, 200_000

#: A later comparison that took longer is less exact than what is known: clocks drift by at most 20 us a second.
_LONGEST_NS = 100_000

#: Comparisons are at least this far apart, so that the error of one is a small part of what lies between two.
_APART_NS = 100_000_000

_SPINS = 50


class _Comparison(NamedTuple):
    event: Any
    before_ns: int  # the event passed between these two times of the host
    after_ns: int

    @property
    def length_ns(self) -> int:
        return self.after_ns - self.before_ns


class DeviceClock:
    """The clock of one device: nanoseconds since a first event, and what they are on the clock of the host.

    An event is recorded on a stream on which nothing else runs, and has passed some 10 us later, whatever other streams
    do. Half of that is the error of a time on the host's clock. Between two comparisons the clocks are taken to drift
    evenly, so a conversion changes no order. CUDA gives the time between two events as a float of 32 bits, so times are
    counted from the last of these events.
    """

    def __init__(self, events: TorchEvents, device: int) -> None:
        """Compares the clocks for the first time, which waits at most a second for what the device does already."""
        self.device = device
        self._events = events
        self._reference: Any = None
        self._reference_ns = 0.0
        self._spare: list[Any] = []
        self._known: deque[tuple[float, float]] = deque(maxlen=_KEPT)  # times of the device, and of the host
        self._compared_ns = 0
        self._take(self._compare(_FIRST_PATIENCE_NS), longest_ns=_FIRST_PATIENCE_NS)
        if self._reference is None:  # it will pass before all that is read
            self._reference = self._spare.pop()

    def compare(self) -> None:
        """Compares the clocks again, unless that was done just now. 50 us; it never waits for work of the program.

        It changes nothing if the device does not answer at once, as where `CUDA_DEVICE_MAX_CONNECTIONS` lets all
        streams share one queue.
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
        """Returns what times of the device are on the clock of the host; NaN if the clocks could not be compared."""
        if not self._known:
            return np.full(len(times_ns), np.nan)
        device, host = np.array(self._known).T
        # Before the first comparison and after the last one both clocks run at one speed.
        converted: npt.NDArray[np.float64] = times_ns + np.interp(times_ns, device, host - device)
        return converted

    def _compare(self, patience_ns: int) -> list[_Comparison]:
        """Returns comparisons; none if the device has not answered."""
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
        """Counts times from the event of the best comparison, and keeps its times."""
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
