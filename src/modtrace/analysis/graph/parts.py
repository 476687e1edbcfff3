"""Selects the ops of a step from which a graph is made."""

from collections.abc import Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from itertools import chain

import numpy as np

from ...recording.module_path import path_and_above
from ...recording.options.path_filter import PathFilter
from ...recording.phase import PHASES
from ..tables.columns import Column
from ..tables.ops import StepOps


@dataclass(frozen=True, kw_only=True)
class Part:
    """A part of a step, as conditions on ops. A field that is None allows everything."""

    phases: tuple[str, ...] | None = None
    paths: PathFilter | None = None  # modules, with all inside them; ops outside of modules are then excluded
    ops: tuple[str, ...] | None = None  # globs for ops, with or without namespace and overload: `*mm*`

    def __post_init__(self) -> None:
        for phase in self.phases or ():
            if phase not in PHASES:
                raise ValueError(f"no phase {phase!r}; there are: {', '.join(PHASES)}")

    def has_phase(self, phase: Column) -> Column:
        """Returns which of the given codes of PHASES are in the part."""
        if self.phases is None:
            return np.ones(len(phase), bool)
        return np.isin(phase, [PHASES.index(name) for name in self.phases])

    def has_places(self, paths: Sequence[str | None]) -> list[bool]:
        """Returns which of the given paths are in the part; None stands for no module."""
        if self.paths is None:
            return [True] * len(paths)
        around = {path: path_and_above(path) for path in set(paths) if path is not None}
        named = {path for path in {*chain(*around.values())} if self.paths.selects(path)}
        return [path is not None and not named.isdisjoint(around[path]) for path in paths]

    def of_ops(self, ops: StepOps) -> Column:
        """Returns a mask of the ops that are in the part."""
        places = self.has_places([place.path for place in ops.calls.places])
        none = self.paths is None
        is_place = np.array([*places, none], bool)
        kept = self.has_phase(ops.phase) & is_place[np.where(ops.where >= 0, ops.where, -1)]
        names = np.array([self.has_op(name) for name in ops.names], bool)
        return np.asarray(kept & names[ops.name]) if len(names) else kept

    def has_op(self, name: str) -> bool:
        """Returns whether ops of this name are in the part."""
        return self.ops is None or any(
            fnmatchcase(form, glob) for glob in self.ops for form in forms_of_op(name)
        )


def forms_of_op(name: str) -> tuple[str, ...]:
    """Returns all forms in which an op may be named: `aten.add.Tensor`, `add.Tensor`, `aten.add` and `add`."""
    parts = name.split(".")
    return (name, ".".join(parts[1:]), ".".join(parts[:2]), ".".join(parts[1:2]))


#: The part that contains the whole step.
WHOLE = Part()
