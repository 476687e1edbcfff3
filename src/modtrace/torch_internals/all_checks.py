"""The checks of all private names of torch, which `modtrace doctor` runs."""

from . import (
    autograd,
    checkpoint,
    dynamo,
    frames,
    modes,
    modules,
    ops,
    saved,
    subclasses,
    tensors,
    transforms,
)
from .check import Check

#: Checked on torch 2.13.0 (CPU), where all are found.
CHECKS: tuple[Check, ...] = (
    *autograd.CHECKS,
    *checkpoint.CHECKS,
    *dynamo.CHECKS,
    *frames.CHECKS,
    *modes.CHECKS,
    *modules.CHECKS,
    *ops.CHECKS,
    *saved.CHECKS,
    *subclasses.CHECKS,
    *tensors.CHECKS,
    *transforms.CHECKS,
)


def check_all() -> list[tuple[str, bool, str]]:
    """Returns for every private name: its full name, whether it is there, and what is lost without it."""
    return [(each.name, each.is_found, each.what_is_lost) for each in CHECKS]
