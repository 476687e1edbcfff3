"""Runs tests that know nothing of devices on the simulated one: `pytest --on-sim tests/collect`."""

import threading
from collections.abc import Iterator

import pytest
import torch

from .left_out import LEFT_OUT
from .simulated import IS_SKIPPED, WHY_MISSING, simulated


def pytest_sessionstart() -> None:
    """Registers the device: the engine has threads for the devices that are there at the first backward."""
    if not IS_SKIPPED:
        simulated()


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leaves out what cannot run on the device."""
    parts = [part for group in LEFT_OUT for part in group.parts]
    left_out = [item for item in items if any(part in item.nodeid for part in parts)]
    config.hook.pytest_deselected(items=left_out)
    items[:] = [item for item in items if item not in left_out]
    for item in items if IS_SKIPPED else ():
        item.add_marker(pytest.mark.skip(reason=str(WHY_MISSING)))


@pytest.fixture(autouse=True)
def on_simulated_device() -> Iterator[None]:
    """Has tensors made on the device that name no other one, on all threads that Python starts."""
    devices, run = simulated(), threading.Thread.run

    def run_on_device(thread: threading.Thread) -> None:
        with torch.device("sim"):
            run(thread)

    with (
        pytest.MonkeyPatch.context() as patch
    ):  # not that of the test, which ends before what other fixtures check
        patch.setattr(threading.Thread, "run", run_on_device)
        torch.set_default_device("sim")
        try:
            yield
        finally:
            torch.set_default_device(None)
    assert devices.violations() == []
