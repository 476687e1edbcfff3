"""Collects the gradients of a module's inputs and outputs, in eager code and while Dynamo traces."""

import weakref
from collections.abc import Callable, Sequence
from enum import IntEnum
from typing import Any, NamedTuple, TypeAlias

import torch

from ...torch_internals.autograd import graph_task_id, queue_callback
from ...torch_internals.deep_graphs import cut_below
from ...torch_internals.dynamo import keep_out_of_dynamo
from ...torch_internals.tensors import base_of
from ...torch_internals.transforms import is_functorch_tensor
from .op import HookEvent, report


def gets_gradient(tensor: torch.Tensor) -> bool:
    return (
        torch.is_grad_enabled()
        and tensor.requires_grad
        and tensor.layout is torch.strided
        and not tensor.is_nested
        and not is_functorch_tensor(tensor)
    )


#: The key in a node's `metadata` of the entries that await its gradients.
_KEY = "modtrace.compile_safe"


class Awaited:
    """The gradients of one call's inputs or of its outputs, collected until all have arrived.

    Autograd nodes hold it, so it must not hold a node: such a cycle is never freed (torch 2.13).
    """

    def __init__(self, place: torch.Tensor, event: HookEvent, tensors: list[torch.Tensor]) -> None:
        self.place = place
        self.event = event
        ids = [id(tensor) for tensor in tensors]
        #: For each tensor, the position of its first occurrence.
        self.firsts = [ids.index(number) for number in ids]
        self.expected: set[int] = set()
        self.arrived: dict[int, dict[int, torch.Tensor | None]] = {}  # keyed by backward
        self.before: Awaited | None = None
        self.paths: dict[int, _Path] = {}

    def tensors(self, tensors: list[torch.Tensor]) -> list[torch.Tensor | None]:
        """Returns the tensors that get a gradient at their positions, and None for others and for repetitions."""
        return [
            tensor if self.firsts[number] == number and gets_gradient(tensor) else None
            for number, tensor in enumerate(tensors)
        ]

    def listen(self, tensor: torch.Tensor | None, number: int, path: "_Path | None" = None) -> "list[_Entry]":
        """Registers for a tensor's gradient, and returns the entries of its node; [] for None and for a leaf."""
        if tensor is None or tensor.grad_fn is None:
            return []
        entries = _entries_of(tensor)
        entries.append(_Entry(self, number, path or _Path.VIEW))
        if not path:
            self.expected.add(number)
        return entries

    def arrive(self, number: int, gradient: torch.Tensor | None) -> None:
        """Takes a gradient, and calls the hook once all have arrived."""
        task = graph_task_id()
        arrived = self.arrived.get(task)
        if arrived is None:
            arrived = self.arrived[task] = {}
            if len(self.expected) > 1:
                queue_callback(lambda: self.report(task))
        arrived[number] = gradient
        if self.expected.issubset(arrived):
            self.report(task)

    def report(self, task: int) -> None:
        """Calls the hook with the gradients that have arrived, unless it has been called in this backward."""
        arrived = self.arrived.pop(task, None)
        if arrived is None:
            return
        if self.before is not None:
            self.before.report(task)
        report(self.place, self.event, [arrived.get(number) for number in self.firsts], [])


class AwaitedInputs(Awaited):
    """The gradients of one call's inputs."""

    def replace(self, found: list[torch.Tensor], in_tuples: Sequence[bool]) -> list[torch.Tensor]:
        """Returns views of the inputs, whose gradients are those of this call alone. Inputs outside of tuples stay."""
        stay = {id(tensor) for tensor, in_tuple in zip(found, in_tuples, strict=True) if not in_tuple}
        given = list(found)
        self.views: dict[int, _View] = {}
        for number, tensor in enumerate(self.tensors(found)):
            if tensor is None:
                continue
            if id(tensor) not in stay:
                given[number] = tensor.view_as(tensor)
                base_entries = self.listen(_whole_base(tensor), number, _Path.BASE)
                self.listen(tensor, number, _Path.CALLER)
                entries = self.listen(given[number], number)
                self.views[number] = _View(_ref(given[number]), _ref(tensor), entries, base_entries)
            else:
                self.listen(tensor, number)
        return [given[number] for number in self.firsts]

    def end(self, given: list[torch.Tensor], found: list[torch.Tensor]) -> list[torch.Tensor]:
        """Ends the call. Returns what the module returns to its caller: the caller's tensors in place of our views.

        nn.Identity and modules that work in place return their input. If the caller got our view and changed it, the
        gradient would bypass every hook on the caller's own tensor.
        """
        returned = found
        for number, view in self.views.items():
            if number < len(given) and not self._is_below(given[number].grad_fn, given[number].output_nr):
                self.paths[number] = _Path.BASE
                self._lead_others(view.entries, view.base_entries)
            made, caller = view.made(), view.caller()
            if made is None or caller is None or caller.grad_fn is None:
                continue
            if any(tensor is made for tensor in found):
                self.paths.setdefault(number, _Path.CALLER)
                self._lead_others(_entries_of(made), _entries_of(caller))
                returned = [caller if tensor is made else tensor for tensor in returned]
        self.views = {}  # a view holds the entries, and these hold this object
        return returned

    def _lead_others(self, past: "list[_Entry]", along: "list[_Entry]") -> None:
        """Moves further entries on a view, such as those of the module's parts, to where the gradient arrives now."""
        along += [entry for entry in past if entry.awaited is not self]
        past[:] = [entry for entry in past if entry.awaited is self]

    def _is_below(self, node: Any, output: int) -> bool:
        """Returns whether this node, or one of the next few below it, belongs to a view that we made.

        Some hooks make views of views.
        """
        for _ in range(_MAX_HOOKS):
            if node is None:
                return False
            entries: list[_Entry] = node.metadata.get((_KEY, output), [])
            if any(entry.awaited is self and entry.path is _Path.VIEW for entry in entries):
                return True
            node, output = node.next_functions[0] if node.next_functions else (None, 0)
        return False


#: The largest number of blocks, and of user hooks, that are searched on one module.
_MAX_HOOKS = 8


class _Path(IntEnum):
    """The way by which the gradient of an input arrives."""

    VIEW = 0  # from the view that the module was given
    BASE = 1  # from the base of the view, which the module changed in place
    CALLER = 2  # from the caller's tensor, which the module returned unchanged


class _Entry(NamedTuple):
    """A registration for one gradient: the call, the tensor's position in it, and the way by which it arrives."""

    awaited: Awaited
    number: int
    path: _Path

    def is_due(self) -> bool:
        """Returns whether the gradient arrives by the entry's way."""
        return self.awaited.paths.get(self.number, _Path.VIEW) is self.path


def _entries_of(tensor: torch.Tensor) -> list[_Entry]:
    """Returns the entries for the gradient of a tensor that is no leaf; entries appended later receive it, too."""
    node: Any = tensor.grad_fn
    output = tensor.output_nr
    entries: list[_Entry] | None = node.metadata.get((_KEY, output))
    if entries is None:
        entries = node.metadata[_KEY, output] = []
        _listen_at(tensor, entries)
    return entries


def _listen_at(tensor: torch.Tensor, entries: list[_Entry]) -> None:
    """Registers one hook on the node that made a tensor, which serves all of its entries."""
    node: Any = tensor.grad_fn
    output = tensor.output_nr

    def run(gradient: torch.Tensor | None) -> None:
        # In reverse, because a module precedes its parts, and the user of a tensor its maker.
        for entry in reversed(entries):
            if entry.is_due():
                entry.awaited.arrive(entry.number, gradient)

    if type(tensor) is torch.Tensor:
        cut_below(node, node.next_functions)
        node.register_prehook(lambda gradients: run(gradients[output]))
    else:
        # AOTAutograd ends its backward at the graph's inputs, whose nodes do not run, so a hook on the tensor is
        # needed.
        tensor.register_hook(run)  # type: ignore[no-untyped-call]


_Ref: TypeAlias = Callable[[], torch.Tensor | None]


class _View(NamedTuple):
    """A view that a module was given, the tensor that it views, and the entries on both."""

    made: _Ref
    caller: _Ref
    entries: list[_Entry]
    base_entries: list[_Entry]


def _ref(tensor: torch.Tensor) -> _Ref:
    """Returns a function that returns the tensor, or None once the tensor has been freed.

    While Dynamo traces, tensors are of another type. The function keeps these alive, because the tracer drops a tensor
    that no node of its graph names.
    """
    return weakref.ref(tensor) if type(tensor) is torch.Tensor else lambda: tensor


def _whole_base(tensor: torch.Tensor) -> torch.Tensor | None:
    """Returns the tensor that receives the gradient once a view is changed in place.

    Returns None if it is larger than the view.
    """
    base = base_of(tensor)
    if base is None:
        return tensor
    return base if base.shape == tensor.shape and base.stride() == tensor.stride() else None


def keep_gradients_out_of_dynamo() -> None:
    """Keeps Dynamo from tracing the hooks of this file that run in eager code."""
    keep_out_of_dynamo(_listen_at)
