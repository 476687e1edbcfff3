"""The phases in which a call can run."""

from typing import Generic, TypeVar

FORWARD = "forward"
BACKWARD = "backward"
RECOMPUTE = "recompute"
OPTIMIZER = "optimizer"

#: All phases, in the order of their codes in the tables. Append new phases at the end.
PHASES = (FORWARD, BACKWARD, RECOMPUTE, OPTIMIZER)
PHASE_CODE = {phase: code for code, phase in enumerate(PHASES)}


Part = TypeVar("Part")


class ByPhase(Generic[Part]):
    """A base class for objects with a field for each phase."""

    __slots__ = ()

    def phase(self, name: str) -> Part:
        """Returns the field of a phase."""
        part: Part = getattr(self, name)
        return part
