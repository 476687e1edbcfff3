"""Taps the outputs of modules inside of compiled code, and the gradients of these outputs."""

import threading
import weakref
from array import array
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import cache, lru_cache, partial
from hashlib import sha256
from itertools import count
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import torch
from torch import nn

from ...torch_internals.compiler_caches import CachedGraphs
from ...torch_internals.dynamo import (
    is_dynamo_compiling,
    is_in_body,
    keep_out_of_dynamo,
    make_effectful_op,
    never_recomputed,
)
from ...torch_internals.modes import is_exporting, unseen
from ...torch_internals.module_copies import leave_out_of_copies
from ...torch_internals.tensors import hook_first, version_of
from ...torch_internals.transforms import is_batched_tensor
from .gradients import gets_gradient
from .in_graphs import find_in_graph, with_fresh
from .stale import make_stale


class TappedOutput(NamedTuple):
    """The tensors that a module returned; a module that returned none is still counted. Modes see no op on them."""

    tensors: Sequence[torch.Tensor]
    slots: Sequence[str]
    layout: Sequence[str]  # describes the containers of the tensors
    #: The module and the number of the call that returned the same tensors just before; None if none did.
    same_as: tuple[int, int] | None


class TapReceiver(Protocol):
    """Receives tensors while compiled code runs. Modules are numbered in the order in which they were tapped."""

    def tapped(self, index: int, found: TappedOutput) -> int:
        """Receives the output of a module.

        Returns:
            the number of the call, which its gradients will carry; -1 if they are not wanted.
        """

    def tapped_gradient(
        self, index: int, call: int, slot: str, gradient: torch.Tensor, is_same: bool
    ) -> None:
        """Receives the gradient of a module's output in a call.

        If `is_same`, the gradient is the one that the receiver was given just before.
        """

    def left_out(self) -> None:
        """Is called after modules inside of `torch.cond`, `torch.vmap` and the like were traced without taps."""


#: The receivers of open recordings by number. Compiled code may outlive a recording, so it knows only the number.
_receivers: dict[int, TapReceiver] = {}
_numbers = count()


class Taps:
    """The taps of one receiver. Modules are identified by the order in which they were tapped."""

    def __init__(self, receiver: TapReceiver) -> None:
        _prepare_torch()
        self.number = next(_numbers)  # unique among all taps of this process
        self._stack = ExitStack()
        self._tapped = 0
        _receivers[self.number] = receiver
        _cached_graphs().start()

    def tap(self, module: nn.Module) -> None:
        """Taps the outputs of a module in compiled code; in eager code nothing is tapped."""
        with unseen(), torch.inference_mode(False):
            place = torch.tensor([self.number, self._tapped], device="cpu")
        self._tapped += 1
        handle = module.register_forward_hook(_Hook(place), prepend=True)
        self._stack.callback(handle.remove)
        self._stack.callback(leave_out_of_copies(module, hooks=[handle]))
        make_stale(module, self._stack)

    def remove(self) -> None:
        """Removes all taps."""
        _receivers.pop(self.number, None)
        if not _receivers:
            _cached_graphs().stop()
        self._stack.close()


class _Hook:
    """A forward hook through which Dynamo traces. The module's number becomes an input of the compiled code.

    A copy of a tapped model, in memory or in a file, gets a hook that does nothing.
    """

    def __init__(self, place: torch.Tensor) -> None:
        self.place = place

    def __call__(self, module: nn.Module, args: Any, output: Any) -> Any:
        if not is_dynamo_compiling() or is_exporting():
            return None
        if is_in_body(_report_left_out):
            return None
        found: list[torch.Tensor] = []
        in_tuples: list[bool] = []
        slots: list[str] = []
        layout: list[str] = []
        find_in_graph(output, True, found, in_tuples, 0, slots, "", layout)
        returned = _tap_in_graph(self.place, "\n".join(slots), "\n".join(layout), *found)
        in_tuple = [tensor for tensor, fits in zip(returned, in_tuples, strict=True) if fits]
        return with_fresh(output, iter(in_tuple))

    def __deepcopy__(self, memo: Any) -> Callable[..., None]:
        return no_hook

    def __reduce__(self) -> Any:
        return _no_hook_in_file, ()


def _no_hook_in_file() -> Callable[..., None]:
    return no_hook


def no_hook(module: nn.Module, args: Any, output: Any) -> None:
    """Does nothing, in place of the hook in copies of a tapped model."""


class _TappedLast(threading.local):
    """The last tap in any compiler's trace on this thread, as a module often returns what its last part returned."""

    def __init__(self) -> None:
        self.found: list[tuple[Any, int | None]] = []  # references to the tensors, with their versions
        self.call: Any = lambda: None
        self.waiting: Sequence[list[tuple[torch.Tensor, str]]] = []

    def find(self, found: Sequence[torch.Tensor]) -> torch.Tensor | None:
        """Returns the call that returned these tensors, if they were not written to since."""
        before = [(ref(), version) for ref, version in self.found]
        now = [(tensor, version_of(tensor)) for tensor in found]
        is_same = len(before) == len(now) and all(
            one is other and at == then is not None
            for (one, at), (other, then) in zip(before, now, strict=True)
        )
        return self.call() if is_same else None


_last = _TappedLast()


def _tap_in_graph(
    place: torch.Tensor, slots: str, layout: str, *found: torch.Tensor
) -> tuple[torch.Tensor, ...]:
    """Taps tensors. It is a node of Dynamo's graph, in which AOTAutograd traces only the two ops."""
    if any(map(is_batched_tensor, found)):
        _report_left_out()
        return found
    returned, gradient_op = tap_ops()
    earlier = _last.find(found) if found else None
    with never_recomputed():
        call = returned(list(found), place, slots, layout, earlier)
    if earlier is None:
        _last.found = [(weakref.ref(tensor), version_of(tensor)) for tensor in found]
        _last.waiting = [[] for _ in found]
    _last.call = weakref.ref(call)
    for slot, tensor, waiting in zip(slots.split("\n"), found, _last.waiting, strict=False):
        if gets_gradient(tensor):
            if not waiting:
                hook_first(tensor, partial(_tap_gradient, gradient_op, waiting))
            waiting.append((call, slot))
    return found


def _tap_gradient(
    op: Callable[..., None], waiting: Sequence[tuple[torch.Tensor, str]], gradient: torch.Tensor
) -> None:
    calls, slots = zip(*reversed(waiting), strict=True)  # a module precedes its parts
    op(gradient, list(calls), "\n".join(slots))


@lru_cache
def _lines(text: str) -> Sequence[str]:
    return text.split("\n")


@cache
def tap_ops() -> tuple[Callable[..., torch.Tensor], Callable[..., None]]:
    """Returns the op that ends the call of a module, and the op that receives its gradients."""

    def tap_returned(
        found: list[torch.Tensor],
        place: torch.Tensor,
        slots: str,
        layout: str,
        earlier: torch.Tensor | None,
    ) -> torch.Tensor:
        with unseen():
            number, index = place.tolist()
            receiver = _receivers.get(number)
            call = -1
            if receiver is not None:
                of, *same_as = (-1,) if earlier is None else earlier.tolist()
                same = tuple(same_as) if of == number else None
                call = receiver.tapped(index, TappedOutput(found, _lines(slots), _lines(layout), same))
            # Between compiled ops Python is cold in the caches, so this takes 38 us; `torch.tensor` would take 92 us.
            return torch.frombuffer(array("q", (number, index, call)), dtype=torch.int64)

    def tap_gradient(gradient: torch.Tensor, calls: list[torch.Tensor], slots: str) -> None:
        with unseen():
            served = None
            for (number, index, of_call), slot in zip(
                (call.tolist() for call in calls), _lines(slots), strict=True
            ):
                receiver = _receivers.get(number)
                if receiver is not None and of_call >= 0:
                    receiver.tapped_gradient(index, of_call, slot, gradient, receiver is served)
                    served = receiver

    fakes = (
        lambda found, place, slots, layout, earlier: torch.empty(3, dtype=torch.int64, device="cpu"),
        lambda gradient, calls, slots: None,
    )
    return (
        make_effectful_op(
            "tap_returned(Tensor[] found, Tensor place, str slots, str layout, Tensor? earlier) -> Tensor",
            tap_returned,
            fakes[0],
        ),
        make_effectful_op(
            "tap_gradient(Tensor gradient, Tensor[] calls, str slots) -> ()", tap_gradient, fakes[1]
        ),
    )


@cache
def _cached_graphs() -> CachedGraphs:
    """Returns the patch with which compilers keep graphs with taps in their caches."""
    return CachedGraphs(_tap_in_graph, sha256(Path(__file__).read_bytes()).hexdigest())


def _report_left_out() -> None:
    for receiver in list(_receivers.values()):
        receiver.left_out()


@cache
def _prepare_torch() -> None:
    """Creates the ops, and keeps Dynamo out of the function that is a node of its graph."""
    tap_ops()
    keep_out_of_dynamo(find_in_graph, with_fresh, _tap_gradient)
    keep_out_of_dynamo(_Hook.__call__, with_callees=False)
    torch.compiler.allow_in_graph(_tap_in_graph)  # type: ignore[no-untyped-call]
