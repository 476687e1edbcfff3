"""Notifies of storages that Python code resizes, which the dispatcher does not see."""

from collections.abc import Callable
from functools import wraps
from typing import Any

import torch

#: A function that receives a storage which has been resized.
Receiver = Callable[[torch.UntypedStorage], None]

_receivers: list[Receiver] = []
_installed: tuple[Any, Any] | None = (
    None  # our `resize_` and the one that it calls, while there are receivers
)


def watch_resizes(receiver: Receiver) -> None:
    """Calls `receiver` after each `UntypedStorage.resize_`, on any thread, until `unwatch_resizes`.

    FSDP frees the memory of parameters by it, and allocates it again. All receivers share one wrapper, because two
    could not be removed in any order.
    """
    global _installed
    _receivers.append(receiver)
    if _installed is None:
        original: Any = torch.UntypedStorage.resize_
        _installed = _wrap(original), original
        torch.UntypedStorage.resize_ = _installed[0]  # type: ignore[method-assign]


def unwatch_resizes(receiver: Receiver) -> None:
    """Removes a receiver, and the wrapper with the last one; it does nothing if there is no such receiver.

    If other code has wrapped our wrapper since, it stays and passes calls on.
    """
    global _installed
    if receiver in _receivers:
        _receivers.remove(receiver)
    if _installed is None or _receivers:
        return
    (wrapper, original), _installed = _installed, None
    if vars(torch.UntypedStorage).get("resize_") is wrapper:
        del torch.UntypedStorage.resize_
        if torch.UntypedStorage.resize_ is not original:  # it was not inherited
            torch.UntypedStorage.resize_ = original  # type: ignore[method-assign]


def _wrap(original: Any) -> Any:
    @wraps(original)
    def resize_(self: torch.UntypedStorage, *args: Any, **kwargs: Any) -> Any:
        result = original(self, *args, **kwargs)
        for receive in tuple(_receivers):
            receive(self)
        return result

    return resize_
