"""Gradients of what goes into a module and comes out of it, awaited until all are there; also where it is traced."""

import weakref
from collections.abc import Callable, Sequence
from enum import IntEnum
from typing import Any, NamedTuple, TypeAlias

import torch

from ...torch_internals.autograd import graph_task_id, queue_callback
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


#: Under this key a node's `metadata` has who awaits its gradients.
_KEY = "modtrace.compile_safe"


class Awaited:
    """The gradients of one call's inputs, or of its outputs, collected until all are there.

    It hangs on autograd nodes and so must not hold one: such a ring is never freed (torch 2.13).
    """

    def __init__(self, place: torch.Tensor, event: HookEvent, tensors: list[torch.Tensor]) -> None:
        self.place = place
        self.event = event
        ids = [id(each) for each in tensors]
        self.firsts = [ids.index(each) for each in ids]  # where each tensor is for the first time
        self.expected: set[int] = set()
        self.arrived: dict[int, dict[int, torch.Tensor | None]] = {}  # by backward
        self.before: Awaited | None = None
        self.paths: dict[int, _Path] = {}

    def tensors(self, tensors: list[torch.Tensor]) -> list[torch.Tensor | None]:
        """Returns the tensors that get a gradient, at their places; None for others and for repetitions."""
        return [
            each if self.firsts[number] == number and gets_gradient(each) else None
            for number, each in enumerate(tensors)
        ]

    def listen(self, tensor: torch.Tensor | None, number: int, path: "_Path | None" = None) -> "list[_Entry]":
        """Awaits the gradient of a tensor, beside the others returned; does nothing if it is a leaf."""
        if tensor is None or tensor.grad_fn is None:
            return []
        entries = _entries_of(tensor)
        entries.append(_Entry(self, number, path or _Path.VIEW))
        if not path:
            self.expected.add(number)
        return entries

    def arrive(self, number: int, gradient: torch.Tensor | None) -> None:
        """Takes a gradient; with the last one the hook is called."""
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
        """Calls the hook with what has arrived, once."""
        arrived = self.arrived.pop(task, None)
        if arrived is None:
            return
        if self.before is not None:
            self.before.report(task)
        report(self.place, self.event, [arrived.get(number) for number in self.firsts], [])


class AwaitedInputs(Awaited):
    """The gradients of one call's inputs."""

    def replace(self, found: list[torch.Tensor], in_tuples: Sequence[bool]) -> list[torch.Tensor]:
        """Views of the inputs: their gradients are those of this call alone. What cannot be replaced stays."""
        stay = {id(each) for each, in_tuple in zip(found, in_tuples, strict=True) if not in_tuple}
        given = list(found)
        self.views: dict[int, _View] = {}
        for number, each in enumerate(self.tensors(found)):
            if each is None:
                continue
            if id(each) not in stay:
                given[number] = each.view_as(each)
                base_entries = self.listen(_whole_base(each), number, _Path.BASE)
                self.listen(each, number, _Path.CALLER)
                entries = self.listen(given[number], number)
                self.views[number] = _View(_ref(given[number]), _ref(each), entries, base_entries)
            else:
                self.listen(each, number)
        return [given[number] for number in self.firsts]

    def end(self, given: list[torch.Tensor], found: list[torch.Tensor]) -> list[torch.Tensor]:
        """Ends the call; returns what it shall return: the caller's tensors instead of our views of them.

        nn.Identity returns its input, and others that work in place: the caller would change our view, and so the
        gradient would go past all that listens to it.
        """
        returned = found
        for number, view in self.views.items():
            if number < len(given) and not self._is_below(given[number].grad_fn, given[number].output_nr):
                self.paths[number] = _Path.BASE
                self._lead_others(view.entries, view.base_entries)
            made, caller = view.made(), view.caller()
            if made is None or caller is None or caller.grad_fn is None:
                continue
            if any(each is made for each in found):
                self.paths.setdefault(number, _Path.CALLER)
                self._lead_others(_entries_of(made), _entries_of(caller))
                returned = [caller if each is made else each for each in returned]
        self.views = {}  # it knows the entries, and these know us
        return returned

    def _lead_others(self, past: "list[_Entry]", along: "list[_Entry]") -> None:
        """Leads what else listens to a view, as parts of this module do, where its gradient comes along now."""
        along += [entry for entry in past if entry.awaited is not self]
        past[:] = [entry for entry in past if entry.awaited is self]

    def _is_below(self, node: Any, output: int) -> bool:
        """Tells whether the node of a view is this one or a little below: some hooks make views of views."""
        for _ in range(_MAX_HOOKS):
            if node is None:
                return False
            if any(entry.awaited is self and entry.path is _Path.VIEW for entry in _entries_at(node, output)):
                return True
            node, output = node.next_functions[0] if node.next_functions else (None, 0)
        return False


#: Blocks and hooks of the user at one module, at most, that are looked through.
_MAX_HOOKS = 8


class _Path(IntEnum):
    """Where the gradient of an input comes along."""

    VIEW = 0  # from the view that the module got
    BASE = 1  # past it, as it was changed in place
    CALLER = 2  # from the caller's tensor, as the module returned it as it is


class _Entry(NamedTuple):
    """One gradient that is awaited somewhere: by whom, which of theirs it is, and if it comes along which path."""

    awaited: Awaited
    number: int
    path: _Path

    def is_due(self) -> bool:
        """Tells whether the gradient comes along this path."""
        return self.awaited.paths.get(self.number, _Path.VIEW) is self.path


def _entries_at(node: Any, output: int) -> list[_Entry]:
    """Who awaits this output's gradient at an autograd node, in the order in which they came."""
    entries: list[_Entry] = node.metadata.get((_KEY, output), [])
    return entries


def _entries_of(tensor: torch.Tensor) -> list[_Entry]:
    """Who awaits the gradient of a tensor that is no leaf; who is added will get it."""
    node: Any = tensor.grad_fn
    output = tensor.output_nr
    entries: list[_Entry] | None = node.metadata.get((_KEY, output))
    if entries is None:
        entries = node.metadata[_KEY, output] = []
        _listen_at(tensor, entries)
    return entries


def _listen_at(tensor: torch.Tensor, entries: list[_Entry]) -> None:
    """Hangs entries on the node that made a tensor."""
    node: Any = tensor.grad_fn
    output = tensor.output_nr

    def run(gradient: torch.Tensor | None) -> None:
        # The last one first: a module before its parts, and what uses a tensor before what made it.
        for entry in reversed(entries):
            if entry.is_due():
                entry.awaited.arrive(entry.number, gradient)

    if type(tensor) is torch.Tensor:
        node.register_prehook(lambda gradients: run(gradients[output]))
    else:
        # AOTAutograd ends its backward at the inputs of the graph, which are no leaves to it: their nodes do not run.
        tensor.register_hook(run)  # type: ignore[no-untyped-call]


_Ref: TypeAlias = Callable[[], torch.Tensor | None]


class _View(NamedTuple):
    """A view that a module got, what it is a view of, and what listens to the view and to its base."""

    made: _Ref
    caller: _Ref
    entries: list[_Entry]
    base_entries: list[_Entry]


def _ref(tensor: torch.Tensor) -> _Ref:
    """Returns a weak reference; a strong one while this is traced, as the tracer drops what no node names."""
    return weakref.ref(tensor) if type(tensor) is torch.Tensor else lambda: tensor


def _whole_base(tensor: torch.Tensor) -> torch.Tensor | None:
    """Returns what gets the gradient of a view of the tensor changed in place; None if it is larger."""
    base = base_of(tensor)
    if base is None:
        return tensor
    return base if base.shape == tensor.shape and base.stride() == tensor.stride() else None


def keep_gradients_out_of_dynamo() -> None:
    """Has Dynamo leave alone what runs here in eager."""
    keep_out_of_dynamo(_listen_at)
