"""Reads the flag `training` of models and of their modules that compute something else in training."""

import weakref
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
from torch import nn

from ..identity_map import IdentityMap
from ..log.segments import Segment
from ..names.module_names import ModuleNames
from ..names.walk import descendants


class TrainingFlags:
    """The flags of one model: those of the model itself, and of its modules that drop out or keep statistics."""

    def __init__(self, module_ids: Sequence[int], flags: Sequence[bool]) -> None:
        self.flags = flags
        self._of_id = np.full(max(module_ids) + 1, -1, np.int8)
        self._of_id[[*module_ids]] = flags

    def of(self, module_ids: npt.NDArray[Any]) -> npt.NDArray[np.int8]:
        """Returns the flag of each module; -1 where it was not read."""
        flags = self._of_id[np.minimum(module_ids, len(self._of_id) - 1)]
        return np.where(module_ids < len(self._of_id), flags, -1).astype(np.int8)


class TrainingFlagReader:
    """Reads the flags as an outermost call begins, 0.1 us for each module that has one that matters."""

    def __init__(self, names: ModuleNames) -> None:
        self._names = names
        self._known: IdentityMap[nn.Module, _Model] = IdentityMap()

    def read(self, segment: Segment) -> None:
        """Sets the flags of a segment, unless its outermost call is that of a named scope."""
        module = segment.named.module
        if module is None:
            return
        known = self._known.get(module)
        if known is None or known.revision != self._names.revision:
            self._known.sweep()  # models may come and go
            known = self._known[module] = _Model(module, self._names)
        segment.training = known.read()


class _Model:
    """The modules of one model whose flags matter, and the last flags."""

    def __init__(self, module: nn.Module, names: ModuleNames) -> None:
        self.revision = names.revision
        found = [
            (named.module_id, weakref.ref(part))
            for part in _parts(module)
            if (named := names.get(part)) is not None
        ]
        self._module_ids = [module_id for module_id, _ in found]
        self._refs = [ref for _, ref in found]
        self._last: TrainingFlags | None = None

    def read(self) -> TrainingFlags | None:
        # A module may have no `training`, if its class does not call `nn.Module.__init__`.
        parts = [ref() for ref in self._refs]
        flags = [part is not None and vars(part).get("training") is True for part in parts]
        if self._module_ids and (self._last is None or self._last.flags != flags):
            self._last = TrainingFlags(self._module_ids, flags)
        return self._last


def _parts(module: nn.Module) -> Iterator[nn.Module]:
    """Yields a model, and its modules that compute something else in training."""
    yield module
    yield from filter(_differs_in_training, descendants(module))


def _differs_in_training(part: nn.Module) -> bool:
    # By names, as DropPath of vision models has no base class of torch's. A module of the user's may lack attributes.
    names = " ".join(kind.__name__ for kind in type(part).__mro__)
    held = vars(part)
    if "BatchNorm" in names or "InstanceNorm" in names:
        return bool(
            held.get("track_running_stats", True)
        )  # without these it takes those of the batch in evaluation
    if "RNNBase" in names or "MultiheadAttention" in names:
        return _is_above_0(held.get("dropout", 0))
    return "Drop" in names and _is_above_0(held.get("p", 1))


def _is_above_0(value: object) -> bool:
    return not isinstance(value, (int, float)) or value > 0
