"""Says why a recording has not what a check needs, and what to record for it."""

from collections.abc import Mapping
from typing import Any

from ...recording.meta import RUN_ENDED
from ...recording.options.capture import DEFAULT_ROLES, STATS
from ...recording.role import PARAMETER, UPDATE
from ...recording.suggestions import count_of
from ..tables.sampled_steps import SampledSteps
from .finding import CannotCheck

_RECORD_OPS = "record --ops (ops=True)"
_RECORD_BACKWARDS = "record --backward-times (backward_times=True) or --ops (ops=True)"

_RECORD_STATS = "record --values stats (values='stats')"
_ADD_STATS = "record --capture stats beside the others (values=['stats', ...])"
_RECORD_UPDATES = (
    "record --capture stats --capture roles=update,parameter "
    "(values=['stats', modtrace.Capture(roles=['update', 'parameter'])])"
)


def lacks_values(run: SampledSteps, what: str, *roles: str) -> CannotCheck:
    """Returns the error for a recording without values of any of these roles in its training steps.

    Args:
        run: the recording.
        what: what was not measured, in the plural.
        roles: the roles, of which one is enough; updates are judged by their parameters, and need both.
    """
    meta = run.data.meta
    values = meta.options.get("values")
    wanted = _wanted_roles(values)
    if UPDATE in roles and not {UPDATE, PARAMETER} <= wanted:
        return CannotCheck(f"no {what} were recorded", _RECORD_UPDATES)
    if wanted.isdisjoint(roles):
        return CannotCheck(f"no {what} were recorded", _ADD_STATS if wanted else _RECORD_STATS)
    if is_damaged(run):
        return CannotCheck(f"the recording is not whole, and has no {what}")
    if not len(run.training):
        return CannotCheck("no training step has ended")
    return CannotCheck(f"no {what} were measured in its training steps")


def lacks_ops(run: SampledSteps) -> CannotCheck:
    """Returns the error for a recording without ops."""
    if not run.data.meta.options.get("ops"):
        return CannotCheck("no ops were recorded", _RECORD_OPS)
    return CannotCheck("the recording is not whole, and has no ops" if is_damaged(run) else "no ops ran")


def lacks_backwards(run: SampledSteps) -> CannotCheck:
    """Returns the error for a recording without calls of backwards in its training steps."""
    options = run.data.meta.options
    if not options.get("backward_times") and not options.get("ops"):
        return CannotCheck("no calls of backwards were recorded", _RECORD_BACKWARDS)
    return CannotCheck("no module was called whose backward ran in its training steps")


def require_steps(steps: int, least: int, kind: str = "comparable training", having: str = "") -> None:
    """Refuses a recording with fewer steps than a check needs: steps of a `kind`, `having` something.

    Raises:
        CannotCheck: there are fewer.
    """
    if steps < least:
        what = f"{kind} step".lstrip()
        raise CannotCheck(
            f"it takes {count_of(least, what)}{having}, and the recording has {steps or 'none'}"
        )


def is_damaged(run: SampledSteps) -> bool:
    """Returns whether rows of the recording are missing, other than those that a failed run did not come to."""
    return any(not mark.startswith(RUN_ENDED) for mark in run.data.meta.marks)


def _wanted_roles(values: Any) -> frozenset[str]:
    """Returns the roles of which the option `values` measures statistics."""
    wanted: set[str] = set()
    for capture in [values] if isinstance(values, str) else values or ():
        if capture == STATS:
            wanted.update(DEFAULT_ROLES)
        elif isinstance(capture, Mapping) and capture.get("stats"):
            wanted.update(capture.get("roles", ()))
    return frozenset(wanted)
