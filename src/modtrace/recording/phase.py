"""The phases a call can run in."""

from typing import Generic, TypeVar

FORWARD = "forward"
BACKWARD = "backward"
RECOMPUTE = "recompute"
OPTIMIZER = "optimizer"

#: All phases, in the order of their codes in the tables `calls` and `ops`. A new phase goes to the end.
PHASES = (FORWARD, BACKWARD, RECOMPUTE, OPTIMIZER)
PHASE_CODE = {phase: code for code, phase in enumerate(PHASES)}


Part = TypeVar("Part")


class ByPhase(Generic[Part]):
    """Has a field for each phase."""

    def phase(self, name: str) -> Part:
        """Returns what belongs to a phase."""
        part: Part = getattr(self, name)
        return part
