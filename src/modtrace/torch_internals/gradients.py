"""Reads the gradients of parameters where no other thread may be replacing them.

The engine writes `.grad` without the interpreter's lock, and `p.grad = None` frees a tensor that other threads still
reach through `p` (torch 2.13). To read a gradient meanwhile ends the process. Whose parameters are whose is not known.
"""

import os
import threading
from collections.abc import Iterable

import torch

from .tensors import grad_of

_lock = threading.RLock()  # again by the same thread, if a finalizer of the user's runs a backward
_threads: set[int] = set()  # those that have called a backward, which may have ended


def backward_begins() -> None:
    """Notes that this thread calls a backward: from now on it may make gradients, and replace them at any time."""
    if threading.get_ident() not in _threads:
        with _lock:
            _threads.add(threading.get_ident())


def read_gradients(parameters: Iterable[torch.Tensor | None]) -> list[torch.Tensor | None] | None:
    """Returns the gradient of each parameter; None if another thread that lives has called a backward."""
    given = [*parameters]
    with _lock:  # no other thread becomes one of those meanwhile
        if not _threads <= {threading.get_ident()}:
            _threads.intersection_update([thread.ident for thread in threading.enumerate()])
            if not _threads <= {threading.get_ident()}:
                return None
        return [None if parameter is None else grad_of(parameter) for parameter in given]


def _forget_in_fork() -> None:
    """Forgets the parent's other threads, and replaces the lock, which one of them may hold."""
    global _lock
    _lock = threading.RLock()
    _threads.intersection_update([threading.get_ident()])


if hasattr(os, "register_at_fork"):  # Windows has no fork
    os.register_at_fork(after_in_child=_forget_in_fork)
