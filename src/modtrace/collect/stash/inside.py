"""Receives outputs of modules inside of compiled code, and their gradients, for the stashes of one tracker."""

import warnings
from collections.abc import Callable
from itertools import count
from typing import Any

import torch
from torch import nn

from ...errors import ModtraceWarning
from ...torch_internals.graph_captures import graph_captures
from ..compile.awaited_calls import AwaitedCalls
from ..compile.in_graphs import build_from_layout
from ..compile.taps import TappedOutput, Taps
from ..log.segments import InsideCall
from ..scopes.tracker import ScopeTracker
from ..structures.rebuild import GradientTree
from .gradients import COMES_PERHAPS, OutputGradients, Returned

_OUTSIDE = (
    "nothing is stashed inside of a compiled function that calls a model; compile the model, not the function"
)

_IN_BODIES = (
    "in compiled code, nothing is stashed in functions that are given to torch.cond, torch.vmap and so on"
)


class InsideOutputs:
    """Passes on outputs of tapped modules in their original structure, with copies of the tensors.

    Copies are needed because compiled code reuses a tensor's memory once it no longer needs the tensor.
    """

    def __init__(
        self,
        tracker: ScopeTracker,
        gradients: OutputGradients,
        returned: Callable[[nn.Module, InsideCall, Any], Any],
    ) -> None:
        """Creates the object, which taps nothing before `tap()`.

        Args:
            returned: receives the outputs, and returns the receiver of their gradients, or None if nobody wants them.
        """
        self._tracker = tracker
        self._gradients = gradients
        self._returned = returned
        self._taps = Taps(self)
        self._modules: list[nn.Module] = []
        self._awaited = AwaitedCalls()  # each with the layout and the slots of its output
        self._warned: set[str] = set()

    def tap(self, module: nn.Module) -> None:
        """Taps a module, if it is not tapped yet, and keeps it alive until `stop()`."""
        if not any(known is module for known in self._modules):
            self._modules.append(module)
            self._taps.tap(module)

    def stop(self) -> None:
        """Removes all taps."""
        self._taps.remove()
        self._modules, self._awaited = [], AwaitedCalls()

    # These methods run in compiled code. What the user's function raises reaches the caller of the model.

    def tapped(self, index: int, found: TappedOutput) -> int:
        """Passes on a module's output. Returns a number for its gradients; -1 if they are not wanted."""
        module = self._modules[index]
        call, output = None, None
        with self._tracker.subscribers.guard(module):
            call = self._count(module)
            output = (
                None
                if call is None
                else build_from_layout(iter(found.layout), map(graph_captures.clone, found.tensors))
            )
        if call is None:
            return -1
        wanted = self._returned(module, call, output)
        if wanted is None:
            return -1
        with self._tracker.subscribers.guard(module):
            places = count()
            tree = GradientTree(output, lambda _: next(places))
            returned = Returned(call, wanted, tree, (COMES_PERHAPS,) * len(found.tensors))
            return self._awaited.add(call, (returned, found.slots))
        return -1

    def tapped_gradient(
        self, index: int, call: int, slot: str, gradient: torch.Tensor, is_same: bool
    ) -> None:
        """Passes on the gradient of a module's output."""
        _, kept = self._awaited.get(call)
        if kept is not None:
            returned, slots = kept
            self._gradients.arrived_inside(returned, slots.index(slot), graph_captures.clone(gradient))

    def _count(self, module: nn.Module) -> InsideCall | None:
        """Returns the call that has ended; None if hooks see it, or if a plain function was compiled."""
        segment = self._tracker.logs.current.segment
        if segment is None:
            self._warn(_OUTSIDE)
            return None
        innermost = segment.context_of(segment.open_calls.innermost)
        named = self._tracker.names.get(module)
        if named is None or innermost.module is module:
            return None
        return segment.call_inside(self._taps.number, named.module_id)

    def left_out(self) -> None:
        """Warns about modules that were compiled without taps."""
        self._warn(_IN_BODIES)

    def _warn(self, text: str) -> None:
        if text not in self._warned:
            self._warned.add(text)
            warnings.warn(text, ModtraceWarning, stacklevel=2)
