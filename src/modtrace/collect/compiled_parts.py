"""Finds which compiled parts of modtrace are missing, and warns of what that costs."""

import importlib
import warnings
from typing import NamedTuple

from ..errors import ModtraceWarning

KERNEL = "kernel"
TENSOR_IDS = "tensor ids"

#: The compiled parts, with what each does, and how much slower Python and numpy are at it.
_MODULES = (
    (KERNEL, "modtrace.measure.moments._moments", "measuring values takes three times as long"),
    (KERNEL, "modtrace.measure.tier2._tier2", "counting exponents (stats=2) takes ten times as long"),
    (
        KERNEL,
        "modtrace.measure.fingerprints._fingerprint",
        "hashing tensors takes up to thirty times as long",
    ),
    (TENSOR_IDS, "modtrace.collect.tensor_ids._tensor_ids", "recording ops takes twice as long"),
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


def warn_of_missing_parts(*, values: bool, ops: bool) -> None:
    """Warns, once in a process, that missing parts make recording slower."""
    global _has_warned
    if _has_warned:
        return
    wanted = {KERNEL: values, TENSOR_IDS: ops}
    costs = [missing.cost for missing in find_missing_parts() if wanted[missing.part]]
    if not costs:
        return
    _has_warned = True
    warnings.warn(
        f"modtrace runs without all of its compiled parts: {costs[0]}. Install a C compiler, then modtrace again; "
        "`modtrace doctor` says what is missing.",
        ModtraceWarning,
        stacklevel=4,
    )
