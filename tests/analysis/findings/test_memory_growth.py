"""A trend of memory is found, and what a healthy run does with memory is no trend."""

from collections.abc import Callable

import numpy as np
import pytest

from builders import RecordingBuilder
from modtrace.analysis.findings.check import run_checks
from modtrace.analysis.findings.finding import Finding
from modtrace.analysis.findings.memory_growth import MEMORY_GROWTH

MB = 1e6

#: The size of a process in a step, by its number and that of all steps, with noise of some MB.
HEALTHY: dict[str, Callable[[int, int], float]] = {
    "level": lambda step, count: 800,
    "first steps allocate": lambda step, count: 800 + min(step, 5) * 60,
    "caches fill": lambda step, count: 1000 - 200 * np.exp(-8 * step / count),
    "one jump": lambda step, count: 800 + (200 if step > count / 2 else 0),
    "falls": lambda step, count: 1000 - 300 * step / count,
    "evaluation every tenth step": lambda step, count: 800 + (300 if step % 10 == 9 else 0),
}


def _find(size_mb: Callable[[int, int], float], count: int, column: str = "resident_bytes") -> list[Finding]:
    build = RecordingBuilder()
    noise = np.random.default_rng(0).normal(0, 3 if column == "resident_bytes" else 0, count)
    for step in range(count):
        size = int((size_mb(step, count) + noise[step]) * MB)
        build.step(step, step * 100, step * 100 + 90, **{column: size})
    found = run_checks(build.data(), [MEMORY_GROWTH])
    assert found.checked == ("memory-growth",)
    return [*found.findings]


@pytest.mark.parametrize("count", [16, 50, 1000])
@pytest.mark.parametrize("healthy", HEALTHY)
def test_healthy_run_has_no_trend(healthy: str, count: int) -> None:
    assert not _find(HEALTHY[healthy], count)


@pytest.mark.parametrize("count", [16, 50, 1000])
@pytest.mark.parametrize("grown_mb", [60, 5000])
def test_trend_is_found_with_its_slope(grown_mb: float, count: int) -> None:
    [found] = _find(lambda step, steps: 800 + grown_mb * step / steps, count)
    assert found.severity == "warning"
    assert found.text.startswith("memory of the process grows by ")
    slope = float(found.text.split(" by ")[1].split()[0]) * (1 if " MB a step" in found.text else 1e-3)
    assert slope == pytest.approx(grown_mb / count, rel=0.2)


def test_memory_of_a_device_is_exact_and_told_first() -> None:
    [found] = _find(lambda step, steps: 100 + 10 * step / steps, 200, "device_bytes")
    assert found.text.startswith("memory of tensors on the device grows by 50 kB a step")


def test_few_steps_are_not_checked() -> None:
    build = RecordingBuilder()
    for step in range(5):
        build.step(step, step, step + 1, resident_bytes=1000)
    [unchecked] = run_checks(build.data(), [MEMORY_GROWTH]).unchecked
    assert unchecked.why == "it takes 12 steps, and the recording has 5"
