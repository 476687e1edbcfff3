"""The clock of a device is compared with the host's without waiting, and times keep their order."""

from collections.abc import Iterator

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from helpers.simulated_devices import SimulatedDevices, simulated_devices
from modtrace.collect.log.device_clock import DeviceClock


@pytest.fixture
def devices(monkeypatch) -> Iterator[SimulatedDevices]:
    with simulated_devices(monkeypatch) as simulated:
        yield simulated


def pass_time(devices: SimulatedDevices, seconds: float) -> None:
    devices.time.now_ns += int(seconds * 1e9)


def to_host(clock: DeviceClock, devices: SimulatedDevices) -> tuple[float, int]:
    """What an event is on the clock of the host, and what it is in truth."""
    event = devices.record(None, 0, 0)
    devices.time.now_ns = max(devices.time.now_ns, event.passes_ns)
    return float(clock.to_host(np.array([clock.read(event)]))[0]), event.passes_ns


def test_a_time_of_the_device_becomes_one_of_the_host(devices):
    clock = DeviceClock(devices, 0)
    for _ in range(20):
        found, expected = to_host(clock, devices)
        assert found == pytest.approx(expected, abs=10_000)
        pass_time(devices, 10)
        clock.compare()


def test_comparing_uses_few_events_and_nothing_soon_after(devices):
    clock = DeviceClock(devices, 0)
    for _ in range(100):
        pass_time(devices, 1)
        clock.compare()
    assert len(devices.made) < 6
    asked = devices.asked
    clock.compare()
    assert devices.asked == asked


def test_the_first_comparison_waits_for_what_the_device_does_already(devices):
    devices.block_aside(0.2)
    clock = DeviceClock(devices, 0)
    found, expected = to_host(clock, devices)
    assert found == pytest.approx(expected, abs=10_000)


def test_a_device_that_does_not_answer_is_not_waited_for(devices):
    clock = DeviceClock(devices, 0)
    pass_time(devices, 1)
    devices.block_aside(30)
    before_ns = devices.time.now_ns
    clock.compare()
    assert devices.time.now_ns - before_ns < 1_000_000
    found, expected = to_host(clock, devices)  # as far as the clocks have parted since the first comparison
    assert found == pytest.approx(expected, abs=10_000 + 1e9 * devices.DRIFT)


def test_where_the_clocks_could_never_be_compared_no_time_is_known(devices):
    devices.block_aside(30)
    clock = DeviceClock(devices, 0)
    pass_time(devices, 31)
    found, _ = to_host(clock, devices)
    assert np.isnan(found)
    clock.compare()
    found, expected = to_host(clock, devices)
    assert found == pytest.approx(expected, abs=10_000)


comparisons = st.lists(st.tuples(st.integers(1, 10**9), st.integers(1, 10**9)), min_size=1, max_size=20)


@settings(deadline=None)
@given(steps=comparisons, times=st.lists(st.floats(-1e10, 1e12), min_size=2, max_size=20))
def test_conversion_keeps_the_order_of_times(steps, times):
    clock = DeviceClock.__new__(DeviceClock)
    known = np.cumsum([(1e6 + took, 1e6 + other) for took, other in steps], axis=0)
    clock._known = [tuple(row) for row in known.tolist()]
    converted = clock.to_host(np.sort(np.array(times)))
    assert (np.diff(converted) >= -1e-3).all()
