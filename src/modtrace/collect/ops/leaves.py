"""Names the tensors that ops read and no op has made: parameters, buffers, inputs of the model, constants."""

import weakref
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import nn

from ...recording.role import BUFFER, INPUT, LEAF, PARAMETER
from ..log.thread_log import ThreadLog
from ..names.module_names import NamedModule
from ..scopes.tracker import ScopeTracker


class Leaf(NamedTuple):
    """The role, slot and owner of a tensor that no op has made."""

    tensor_id: int
    role: str
    slot: str  # of a parameter or buffer its name in the module, of an input its position among the arguments
    owner: NamedModule | None


class _Input(NamedTuple):
    ref: "weakref.ref[torch.Tensor]"
    slot: str
    owner: NamedModule | None


class OpLeaves:
    """Names leaves when they are first read."""

    def __init__(self, tracker: ScopeTracker) -> None:
        self.found: list[Leaf] = []
        self._tracker = tracker
        self._inputs: dict[int, _Input] = {}  # by `id`, of the outermost calls since the last backward
        self._has_learnt = False

    def take(self) -> list[Leaf]:
        """Returns the leaves named since the last call."""
        found, self.found = self.found, []
        self._has_learnt = False  # once in a while: what nobody owns is never found
        return found

    def note_inputs(self, given: Sequence[tuple[str, torch.Tensor]], owner: NamedModule | None) -> None:
        """Remembers the tensors among the arguments of an outermost call, with their slots."""
        for slot, tensor in reversed(given):  # the first of several slots counts
            self._inputs[id(tensor)] = _Input(weakref.ref(tensor), slot, owner)

    def alive_inputs(self) -> list[torch.Tensor]:
        """Returns the remembered inputs that still live, because their user keeps them."""
        inputs = (known.ref() for known in self._inputs.values())
        return [tensor for tensor in inputs if tensor is not None]

    def forget_inputs(self) -> None:
        """Forgets the inputs, because their backward has run or the recording has ended."""
        self._inputs = {}

    def name(self, tensor_id: int, tensor: torch.Tensor, log: ThreadLog) -> None:
        """Names a tensor that an op is about to read."""
        self.found.append(Leaf(tensor_id, *self._describe(tensor, log)))

    def _describe(self, tensor: torch.Tensor, log: ThreadLog) -> tuple[str, str, NamedModule | None]:
        if is_parameter(tensor):
            owners = self._tracker.names.owners_of(tensor)
            if not owners and not self._has_learnt:
                owners, self._has_learnt = self._tracker.names.owners_of(tensor, learn=True), True
            if owners:
                return PARAMETER, owners[0].name, owners[0].module
        for module, named in _modules_around(log):
            for name, buffer in module._buffers.items():
                if buffer is tensor:
                    return BUFFER, name, named
        known = self._inputs.get(id(tensor))
        if known is not None and known.ref() is tensor:
            return INPUT, known.slot, known.owner
        return LEAF, "", log.context.named


def is_parameter(tensor: torch.Tensor) -> bool:
    """Returns whether a tensor is a parameter. A user's subclass that raises is not counted as one."""
    try:
        return isinstance(tensor, nn.Parameter)
    except Exception:
        return False


def _modules_around(log: ThreadLog) -> Iterator[tuple[nn.Module, NamedModule]]:
    """Yields the modules whose calls run on a thread, innermost first."""
    for context in log.context.upwards():
        named = context.named
        module = context.module
        if module is not None and named is not None:
            yield module, named
