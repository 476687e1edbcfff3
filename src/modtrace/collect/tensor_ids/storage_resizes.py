"""Notifies of storages that Python code resizes, which the dispatcher does not see."""

from collections.abc import Callable
from contextlib import ExitStack
from functools import wraps
from typing import Any

import torch

from ...torch_internals.own_frames import leave_out_own_frames
from ...torch_internals.patches import replace

#: A function that receives a storage which has been resized.
Receiver = Callable[[torch.UntypedStorage], None]

_receivers: list[Receiver] = []
_patches = ExitStack()  # is closed when there is no receiver
_is_wrapped = False


def watch_resizes(receiver: Receiver) -> None:
    """Calls `receiver` after each `UntypedStorage.resize_`, on any thread, until `unwatch_resizes`.

    FSDP frees the memory of parameters by it, and allocates it again. All receivers share one wrapper, because two
    could not be removed in any order.
    """
    global _is_wrapped
    _receivers.append(receiver)
    if not _is_wrapped:
        _is_wrapped = True
        replace(torch.UntypedStorage, "resize_", _wrap(torch.UntypedStorage.resize_), _patches)


def unwatch_resizes(receiver: Receiver) -> None:
    """Removes a receiver, and the wrapper with the last one; it does nothing if there is no such receiver."""
    global _is_wrapped
    if receiver in _receivers:
        _receivers.remove(receiver)
    if not _receivers:
        _is_wrapped = False
        _patches.close()


def _wrap(original: Any) -> Any:
    @wraps(original)
    def resize_(self: torch.UntypedStorage, *args: Any, **kwargs: Any) -> Any:
        try:
            result = original(self, *args, **kwargs)
        except BaseException as error:
            leave_out_own_frames(error)
            raise
        for receive in tuple(_receivers):
            receive(self)
        return result

    return resize_
