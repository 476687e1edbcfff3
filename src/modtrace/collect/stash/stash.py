"""What is kept of a module's output or its gradient: an event, its stash, and the function between them."""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import nn

from ...torch_internals.modes import unseen
from ...torch_internals.transforms import is_functorch_tensor, outside_transforms, wrapped_by_functorch
from ..structures.rebuild import rmap_tensor


@dataclass
class Event:
    """Something that a registered module has returned, or the gradient of it."""

    name: str  #: that it is registered under
    type: type[nn.Module]
    grad: bool  #: a gradient
    value: Any  #: the output as it is, or a tuple of gradients
    args: tuple[Any, ...]  #: of the call; of a gradient ()
    kwargs: dict[str, Any]  #: of the call; of a gradient {}
    step: int | None = None  #: as in `Stash`, as far as they are known by now
    phase: str | None = None
    call: int | None = None


@dataclass
class Stash:
    """What is kept of an event.

    The value of a gradient is a tuple: of the gradients of a tuple or list, `(gradient,)` of a tensor, and of any other
    structure one with the same structure in it; None is where no gradient came.
    """

    name: str
    type: type[nn.Module]
    grad: bool
    value: Any
    #: The step that the forward call belongs to, from 0 since registering; None: not known.
    step: int | None = field(default=None, compare=False)
    #: `forward`, `recompute`, or `backward`: a gradient, or a module that a custom Function's backward runs.
    phase: str | None = field(default=None, compare=False)
    #: How many forward calls of its module came before in the step. A gradient or a recompute has its forward's.
    call: int | None = field(default=None, compare=False)

    @property
    def first_value(self) -> Any:
        """The value, or the first one in it as long as that is a tuple or a list with something in it."""
        value = self.value
        while isinstance(value, (tuple, list)) and value:
            value = value[0]
        return value


StashFn = Callable[[Event], Stash]
StashValueFn = Callable[[torch.Tensor], Any]


def default_stash_value(tensor: torch.Tensor) -> torch.Tensor:
    """A copy of a tensor in CPU memory, without its graph; one on the device `meta` stays there.

    No mode of yours sees the copying. Inside of `vmap` it is a copy of all examples.
    """
    with unseen(), outside_transforms():
        while is_functorch_tensor(tensor):
            tensor = wrapped_by_functorch(tensor)
        detached = tensor.detach()
        copied = detached if detached.device.type == "meta" else detached.cpu()
        return copied.clone() if copied is detached else copied


def default_stash(event: Event, stash_value: StashValueFn) -> Stash:
    """A stash with `stash_value` of each tensor of an event."""
    value = rmap_tensor(event.value, stash_value)
    return Stash(event.name, event.type, event.grad, value, event.step, event.phase, event.call)


def get_stash_fn(stash_value: StashValueFn | None = None, stash: StashFn | None = None) -> StashFn:
    """The function that makes stashes of events.

    Args:
        stash_value: what is kept of each tensor; None: a copy.
        stash: what is kept of a whole event.

    Raises:
        ValueError: both are given.
    """
    if stash_value is not None and stash is not None:
        raise ValueError("stash_value= and stash= are both given. Give one: stash= makes the whole stash.")
    return stash or partial(default_stash, stash_value=stash_value or default_stash_value)
