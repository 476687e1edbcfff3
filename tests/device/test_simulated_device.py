"""What the simulated device promises: protected memory, order, capacity and counts."""

import ctypes
import threading

import pytest
import torch

from device.simulated import IS_SKIPPED, WHY_MISSING, simulated

pytestmark = [pytest.mark.device, pytest.mark.skipif(IS_SKIPPED, reason=str(WHY_MISSING))]


@pytest.fixture
def devices():
    devices = simulated()
    torch.sim.synchronize()
    torch.sim.synchronize("sim:1")
    devices.reset()
    yield devices
    assert devices.violations() == []


def test_memory_that_the_host_touches_is_a_violation(devices, capfd):
    tensor = torch.full((3,), 7.0, device="sim")
    assert ctypes.c_float.from_address(tensor.data_ptr()).value == 7
    assert devices.violations() == ["the host touched 1 pages of devices' memory"]
    assert "the host touches memory of a device in:" in capfd.readouterr().err
    assert tensor.sum().item() == 21, "a kernel may"


def test_launches_copies_and_waits_are_counted(devices):
    tensor = torch.empty(100, device="sim").view(10, 10).t()
    assert devices.counts == (0, 0, 0, 0)
    tensor.fill_(1)
    assert devices.counts == (1, 0, 0, 0)
    total = tensor.sum()
    assert devices.counts == (2, 0, 0, 0)
    assert total.item() == 100
    assert devices.counts == (2, 1, 0, 1)
    torch.ones(3).to("sim").nonzero()
    assert devices.counts == (3, 2, 1, 2)
    torch.sim.synchronize()
    assert (devices.counts.waits, devices.waits_of(threading.current_thread())) == (3, 3)


def test_work_of_another_stream_must_be_waited_for(devices):
    stream = torch.Stream("sim")
    tensor = torch.zeros(3, device="sim")
    with (
        stream,
        pytest.raises(RuntimeError, match=r"a write on stream \d is not ordered behind a write on stream 0"),
    ):
        tensor.add_(1)
    with stream:
        stream.wait_stream(torch.sim.default_stream())
        tensor.add_(1)
        event = stream.record_event()
    with pytest.raises(RuntimeError, match="a read on stream 0 is not ordered behind a write on stream"):
        tensor.sum()
    torch.sim.default_stream().wait_event(event)
    assert tensor.tolist() == [1, 1, 1]


def test_memory_must_not_be_freed_while_another_stream_uses_it(devices):
    stream = torch.Stream("sim")
    for is_recorded in (False, True):
        tensor = torch.zeros(3, device="sim")
        stream.wait_stream(torch.sim.default_stream())
        with stream:
            tensor.add_(1)
        if is_recorded:
            tensor.record_stream(stream)
        del tensor
        found = devices.violations()
        assert len(found) == (not is_recorded)
        assert all("record_stream() was not called" in violation for violation in found)


def test_copy_that_does_not_block_arrives_when_the_host_waits(devices):
    host = torch.zeros(3)
    host.copy_(torch.ones(3, device="sim"), non_blocking=True)
    assert host.tolist() == [0, 0, 0]
    torch.sim.synchronize()
    assert host.tolist() == [1, 1, 1]


def test_devices_do_not_mix(devices):
    first, second = torch.ones(3, device="sim:0"), torch.ones(3, device="sim:1")
    for other in (second, torch.ones(3)):
        with pytest.raises(RuntimeError, match="Expected all tensors to be on the same device"):
            first + other
    assert (first + second.to("sim:0")).tolist() == [2, 2, 2]
    assert (second + 1).device == torch.device("sim:1")
    assert torch.sim.current_device() == 0, "a kernel makes its device current for itself"
    with torch.sim.device(1):
        assert torch.empty(3, device="sim").device == torch.device("sim:1")
    for index in (-2, 2):
        with pytest.raises(RuntimeError, match="there is no device"):
            torch.accelerator.current_stream(
                torch.device("sim", index) if index > 0 else torch.device("sim", 7)
            )


def test_each_thread_has_its_current_device_and_stream(devices):
    found = []

    def look():
        found.append((torch.sim.current_device(), torch.sim.current_stream().stream_id))

    with torch.sim.device(1), torch.Stream("sim:1"):
        thread = threading.Thread(target=look)
        thread.start()
        thread.join()
        look()
    assert found[0] == (0, 0)
    assert found[1][0] == 1 and found[1][1] > 0
