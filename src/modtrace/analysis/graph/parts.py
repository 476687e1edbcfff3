"""Which ops of a step a graph is made of."""

from collections.abc import Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase

import numpy as np

from ...recording.options.path_filter import PathFilter
from ...recording.phase import PHASES
from ..step.calls import Column
from ..step.ops import StepOps


@dataclass(frozen=True, kw_only=True)
class Part:
    """A part of a step; None, here and below: all."""

    phases: tuple[str, ...] | None = None
    paths: PathFilter | None = None  # of the modules that ops run in; what runs in none is no part then
    ops: tuple[str, ...] | None = None  # globs over names, with or without namespace and overload: `*mm*`

    def __post_init__(self) -> None:
        for phase in self.phases or ():
            if phase not in PHASES:
                raise ValueError(f"no phase {phase!r}; there are: {', '.join(PHASES)}")

    def has_phase(self, phase: Column) -> Column:
        """Returns which of these codes of PHASES are in it."""
        if self.phases is None:
            return np.ones(len(phase), bool)
        return np.isin(phase, [PHASES.index(each) for each in self.phases])

    def has_places(self, paths: Sequence[str | None]) -> list[bool]:
        """Returns which of these paths are in it; None is no module's."""
        if self.paths is None:
            return [True] * len(paths)
        return [path is not None and self.paths.selects(path) for path in paths]

    def of_ops(self, ops: StepOps) -> Column:
        """Returns which of the ops are in it."""
        places = self.has_places([each.path for each in ops.placed.places])
        none = self.paths is None
        is_place = np.array([*places, none], bool)
        kept = self.has_phase(ops.phase) & is_place[np.where(ops.where >= 0, ops.where, -1)]
        names = np.array([self._has_op(each) for each in ops.names], bool)
        return np.asarray(kept & names[ops.name]) if len(names) else kept

    def _has_op(self, name: str) -> bool:
        return self.ops is None or any(fnmatchcase(each, glob) for glob in self.ops for each in _forms(name))


def _forms(name: str) -> tuple[str, ...]:
    """Returns the names of an op: `aten.add.Tensor`, `add.Tensor`, `aten.add` and `add`."""
    parts = name.split(".")
    return (name, ".".join(parts[1:]), ".".join(parts[:2]), ".".join(parts[1:2]))


#: Everything.
WHOLE = Part()
