"""Finds which compiled parts of modtrace are missing, and says what that costs."""

import importlib
import warnings
from typing import NamedTuple

from ..errors import MissingLibraryError, ModtraceWarning

KERNEL = "kernel"
TENSOR_IDS = "tensor ids"
COLLECTIVES = "collectives"

#: The compiled parts, with what each does, and how much slower Python and numpy are at it.
_MODULES = (
    (KERNEL, "modtrace.measure.moments._moments", "measuring values takes three times as long"),
    (KERNEL, "modtrace.measure.tier2._tier2", "counting exponents (stats=2) takes ten times as long"),
    (
        KERNEL,
        "modtrace.measure.fingerprints._fingerprint",
        "hashing tensors takes up to thirty times as long",
    ),
    (KERNEL, "modtrace.collect.values._taps", "measuring what modules return takes a third longer"),
    (TENSOR_IDS, "modtrace.collect.tensor_ids._tensor_ids", "ops cannot be recorded"),
    (TENSOR_IDS, "modtrace.collect.ops._op_mode", "ops cannot be recorded"),
    (
        COLLECTIVES,
        "modtrace.collect.collectives._called",
        "all collectives come from torch's log, without their ends, and messages are missing",
    ),
)

_has_warned = False


class MissingPart(NamedTuple):
    """A part of modtrace that was not compiled."""

    part: str
    problem: str
    cost: str


def find_missing_parts() -> list[MissingPart]:
    """Returns the compiled parts that cannot be imported. It does not need torch."""
    return [
        MissingPart(part, problem, cost)
        for part, module, cost in _MODULES
        if (problem := _problem_of(module)) is not None
    ]


def _problem_of(module: str) -> str | None:
    try:
        importlib.import_module(module)
    except ModuleNotFoundError:
        return "not compiled when modtrace was installed"
    except ImportError as error:
        return f"cannot be loaded ({error})"
    return None


def check_parts(*, values: bool, ops: bool) -> None:
    """Warns once in a process that measuring takes longer than it has to.

    Raises:
        MissingLibraryError: ops are to be recorded, and what sees them is not compiled.
    """
    global _has_warned
    missing_parts = find_missing_parts()
    unseen = [missing for missing in missing_parts if ops and missing.part == TENSOR_IDS]
    if unseen:
        raise MissingLibraryError(
            f"record(ops=...), --ops: what sees ops is {unseen[0].problem}. Install a C compiler, then modtrace again "
            "(pip install --force-reinstall --no-deps); `modtrace doctor` says what is missing. Without ops it records."
        )
    costs = [missing.cost for missing in missing_parts if values and missing.part == KERNEL]
    if _has_warned or not costs:
        return
    _has_warned = True
    warnings.warn(
        f"modtrace runs without all of its compiled parts: {costs[0]}. Install a C compiler, then modtrace again; "
        "`modtrace doctor` says what is missing.",
        ModtraceWarning,
        stacklevel=4,
    )
