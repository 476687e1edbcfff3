"""A module's output or gradient as an event, the stash that is kept of it, and the functions between them."""

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
    """An output that a registered module has returned, or the gradients of one."""

    name: str  #: under which it is registered
    type: type[nn.Module]
    grad: bool  #: a gradient
    value: Any  #: the output as it is, or a tuple of gradients
    args: tuple[Any, ...]  #: of the call; () for a gradient
    kwargs: dict[str, Any]  #: of the call; {} for a gradient
    step: int | None = None  #: as in `Stash`, as far as it is known; so are `phase` and `call`
    phase: str | None = None
    call: int | None = None


@dataclass
class Stash:
    """The values kept of an event.

    The value for gradients is a tuple: the gradients of a tuple or list, `(gradient,)` for a tensor, and for any other
    structure a tuple with one entry of the same structure. An entry is None if no gradient arrived.
    """

    name: str
    type: type[nn.Module]
    grad: bool
    value: Any
    #: The step that the forward call belongs to, from 0 since registering; None: not known.
    step: int | None = field(default=None, compare=False)
    #: `forward`, `recompute`, or `backward`: a gradient, or a module that a custom Function's backward runs.
    phase: str | None = field(default=None, compare=False)
    #: The number of earlier forward calls of its module in the step; that of the forward for gradients and recomputes.
    call: int | None = field(default=None, compare=False)

    @property
    def first_value(self) -> Any:
        """The value, or its first element as long as that is a tuple or list with elements."""
        value = self.value
        while isinstance(value, (tuple, list)) and value:
            value = value[0]
        return value


StashFn = Callable[[Event], Stash]
StashValueFn = Callable[[torch.Tensor], Any]


def default_stash_value(tensor: torch.Tensor) -> torch.Tensor | None:
    """Returns a copy of a tensor in CPU memory, detached from its graph; a tensor on the device `meta` stays there.

    The user's modes do not see the copying. Inside `vmap` it is a copy of all examples. It is None, with a warning,
    while a CUDA graph is captured, which the copying would end; captures on other threads are waited for a while.
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
    """Returns a stash with `stash_value(tensor)` in place of each tensor of an event."""
    value = rmap_tensor(event.value, stash_value)
    return Stash(event.name, event.type, event.grad, value, event.step, event.phase, event.call)


def get_stash_fn(stash_value: StashValueFn | None = None, stash: StashFn | None = None) -> StashFn:
    """Returns the function that makes stashes of events.

    Args:
        stash_value: makes what is kept of each tensor; None keeps a copy.
        stash: makes what is kept of a whole event.

    Raises:
        ValueError: both are given.
    """
    if stash_value is not None and stash is not None:
        raise ValueError("stash_value= and stash= are both given. Give one: stash= makes the whole stash.")
    return stash or partial(default_stash, stash_value=stash_value or default_stash_value)
