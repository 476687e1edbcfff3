"""Defines the one op that compiled code calls at the beginning and end of modules. It runs the user's hooks."""

from collections.abc import Callable, Sequence
from enum import IntEnum
from functools import cache
from itertools import count

import torch

from ...torch_internals.dynamo import make_effectful_op
from ...torch_internals.modes import unseen


class HookEvent(IntEnum):
    PRE_FW = 0
    POST_FW = 1
    PRE_BW = 2
    POST_BW = 3


#: The open blocks. All other code refers to a session by its number, so that compiled code and autograd graphs, which
#: may outlive a block, hold none of the user's functions.
_sessions: dict[int, "Session"] = {}
_numbers = count()


class Session:
    """One open block of hooks: the paths of its modules and the user's functions."""

    def __init__(self, paths: list[str], hooks: Sequence[Callable[..., object] | None]) -> None:
        self.number = next(_numbers)
        self.paths = paths
        self.hooks = hooks
        self.events = tuple(hook is not None for hook in hooks)
        _sessions[self.number] = self

    def end(self) -> None:
        """Drops the user's functions."""
        _sessions.pop(self.number, None)


def report(
    place: torch.Tensor,
    event: HookEvent,
    first: Sequence[torch.Tensor | None],
    second: Sequence[torch.Tensor | None],
) -> None:
    """Calls the user's hook.

    While Dynamo traces, tensors are not plain, and the hook is called only when the traced code runs.
    """
    if type(place) is torch.Tensor:
        _run(place, event, first, second)
    else:
        hook_op()(list(first), list(second), place, int(event))


def _run(
    place: torch.Tensor,
    event: int,
    first: Sequence[torch.Tensor | None],
    second: Sequence[torch.Tensor | None],
) -> None:
    with unseen():
        number, index = place.tolist()
    session = _sessions.get(number)
    hook = None if session is None else session.hooks[event]
    if session is not None and hook is not None:
        tensors = (tuple(first), tuple(second)) if event == HookEvent.POST_FW else (tuple(first),)
        with torch.no_grad():
            hook(session.paths[index], *tensors)


@cache
def hook_op() -> Callable[..., None]:
    """Returns the op. It is declared to have an effect, because torch drops ops that change and return nothing."""

    def call_hook(
        first: list[torch.Tensor | None], second: list[torch.Tensor | None], place: torch.Tensor, event: int
    ) -> None:
        _run(place, event, first, second)

    schema = "call_hook(Tensor?[] first, Tensor?[] second, Tensor place, int event) -> ()"
    return make_effectful_op(schema, call_hook, lambda first, second, place, event: None)
