"""Defines the event of a module's output or gradient, the stash that is kept of it, and functions that make one."""

import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import nn

from ...errors import ModtraceWarning
from ...torch_internals.graph_captures import BEING_CAPTURED, graph_captures
from ...torch_internals.modes import unseen
from ...torch_internals.transforms import is_functorch_tensor, outside_transforms, wrapped_by_functorch
from ..structures.rebuild import rmap_tensor


@dataclass
class Event:
    """The output that a registered module returned, or the gradients of one."""

    name: str  #: the name under which the module is registered
    type: type[nn.Module]
    grad: bool  #: whether it is about gradients
    value: Any  #: the output as it is, or a tuple of gradients
    args: tuple[Any, ...]  #: the arguments of the call; () for gradients
    kwargs: dict[str, Any]  #: the keyword arguments of the call; {} for gradients
    step: int | None = None  #: the step as in `Stash`, if known; likewise `phase` and `call`
    phase: str | None = None
    call: int | None = None


@dataclass
class Stash:
    """What is kept of an event.

    The value for gradients is a tuple: the gradients of a tuple or list, `(gradient,)` for a tensor, and for any other
    structure a tuple with one entry of the same structure. An entry is None if no gradient arrived.
    """

    name: str
    type: type[nn.Module]
    grad: bool
    value: Any
    #: The step of the forward call, counted from 0 since registering; None if unknown.
    step: int | None = field(default=None, compare=False)
    #: `forward`, `recompute`, or `backward` (gradients, and modules that run in a custom Function's backward).
    phase: str | None = field(default=None, compare=False)
    #: The number of earlier forward calls of the module in the step; gradients and recomputes have the forward's.
    call: int | None = field(default=None, compare=False)

    @property
    def first_value(self) -> Any:
        """The value; if it is a tuple or list, its first element, and so on."""
        value = self.value
        while isinstance(value, (tuple, list)) and value:
            value = value[0]
        return value


StashFn = Callable[[Event], Stash]
StashValueFn = Callable[[torch.Tensor], Any]


def default_stash_value(tensor: torch.Tensor) -> torch.Tensor | None:
    """Returns a copy of a tensor in CPU memory, detached from its graph; a tensor on the device `meta` stays there.

    The user's modes do not see the copying. Inside `vmap` all examples are copied. The result is None, with a warning,
    while this thread captures a CUDA graph, because copying would end the capture; captures on other threads are waited
    for a while.
    """
    with unseen(), outside_transforms(), graph_captures.device_work(tensor, waits=True) as is_allowed:
        if not is_allowed:
            warnings.warn(
                f"a tensor on a GPU is not stashed: {BEING_CAPTURED}, which copying it would end",
                ModtraceWarning,
                stacklevel=2,
            )
            return None
        while is_functorch_tensor(tensor):
            tensor = wrapped_by_functorch(tensor)
        detached = tensor.detach()
        copied = detached if detached.device.type == "meta" else detached.cpu()
        return copied.clone() if copied is detached else copied


def default_stash(event: Event, stash_value: StashValueFn) -> Stash:
    """Returns a stash of an event in which `stash_value(tensor)` replaces each tensor."""
    value = rmap_tensor(event.value, stash_value)
    return Stash(event.name, event.type, event.grad, value, event.step, event.phase, event.call)


def get_stash_fn(stash_value: StashValueFn | None = None, stash: StashFn | None = None) -> StashFn:
    """Returns the function that makes stashes of events.

    Args:
        stash_value: returns what is kept of each tensor; None keeps a copy.
        stash: returns what is kept of a whole event.

    Raises:
        ValueError: both are given.
    """
    if stash_value is not None and stash is not None:
        raise ValueError("stash_value= and stash= are both given. Give one: stash= makes the whole stash.")
    return stash or partial(default_stash, stash_value=stash_value or default_stash_value)
