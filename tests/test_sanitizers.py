"""Of `make sanitize`: the compiled code that the tests run is the one with sanitizers, and they report faults."""

import importlib
import os
import subprocess
import sys
from pathlib import Path

import pytest

FOLDER = os.environ.get("MODTRACE_SANITIZED", "")

pytestmark = pytest.mark.skipif(not FOLDER, reason="make sanitize runs this")

MODULES = [
    "cli._blocked_call",
    "collect.collectives._called",
    "collect.ops._op_mode",
    "collect.tensor_ids._tensor_ids",
    "collect.values._taps",
    "measure.cuda._cuda_launch",
    "measure.fingerprints._fingerprint",
    "measure.moments._moments",
    "measure.tier2._tier2",
    "torch_internals._released_in_turn",
]


@pytest.mark.parametrize("name", MODULES)
def test_the_module_that_is_loaded_was_built_with_both_sanitizers(name):
    path = importlib.import_module(f"modtrace.{name}").__file__
    assert Path(path).is_relative_to(Path(FOLDER).resolve())
    content = Path(path).read_bytes()
    assert (b"__asan_report_load" in content, b"__ubsan_handle" in content) == (True, True)


#: Python code that has a kernel read beyond 1,000 float32 in `a`, or at odd addresses.
FAULTS = {
    "_moments": "_moments.measure_into({address}, {count}, 1, 0, into)",
    "_tier2": "_tier2.tier2_into({address}, {count}, 0, into)",
    "_fingerprint": "_fingerprint.fingerprint({address}, ({count},), (4,), (1,), 0, 4, 0, 0, signs, swaps, into)",
}
SETTING = """
import numpy as np
from modtrace.measure.fingerprints import _fingerprint
from modtrace.measure.moments import _moments
from modtrace.measure.tier2 import _tier2
a, found, some = np.zeros(1000, np.float32), np.zeros(300), np.zeros(4096, np.uint64)
into, signs, swaps = found.ctypes.data, some.ctypes.data, some.ctypes.data
"""


OVERFLOW = ("a.ctypes.data", 1001, "heap-buffer-overflow")
MISALIGNED = (
    "a.ctypes.data + 1",
    999,
    "misaligned address",
)  # the other kernels copy first, from any address


@pytest.mark.parametrize(
    "module, fault", [*((module, OVERFLOW) for module in FAULTS), ("_moments", MISALIGNED)], ids=str
)
def test_a_fault_in_a_kernel_ends_the_process_with_a_report(module, fault):
    address, count, report = fault
    code = SETTING + FAULTS[module].format(address=address, count=count)
    own = {"ASAN_OPTIONS": "detect_leaks=0", "UBSAN_OPTIONS": ""}  # no report beside those of the other tests
    ran = subprocess.run(
        [sys.executable, "-c", code], env={**os.environ, **own}, capture_output=True, text=True
    )
    assert ran.returncode != 0
    assert report in ran.stderr
    assert f"{module}.c" in ran.stderr
