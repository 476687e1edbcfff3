"""Reads the gradients of parameters where no other thread may be replacing them.

The engine writes `.grad` without the interpreter's lock, and `p.grad = None` frees a tensor that other threads still
reach through `p` (torch 2.13). To read a gradient meanwhile ends the process. Whose parameters are whose is not known.
"""

import os
import threading
import weakref
from collections.abc import Iterable

import torch

from .tensors import grad_of


class _Caller:
    """Stands for a thread that has called a backward, and lives as long as the thread."""


_lock = threading.RLock()  # again by the same thread, if a finalizer of the user's runs a backward
_callers: weakref.WeakSet[_Caller] = weakref.WeakSet()
_of_thread = threading.local()  # by `caller`; a thread's number is used again when it has ended


def backward_begins() -> None:
    """Notes that this thread calls a backward: from now on it may make gradients, and replace them at any time.

    A backward inside of another one replaces them while that one runs, and needs no notice of its own.
    """
    if not hasattr(_of_thread, "caller"):
        with _lock:
            _of_thread.caller = _Caller()
            _callers.add(_of_thread.caller)


def read_gradients(parameters: Iterable[torch.Tensor | None]) -> list[torch.Tensor | None] | None:
    """Returns the gradient of each parameter; None if another thread that lives has called a backward."""
    given, own = [*parameters], getattr(_of_thread, "caller", None)
    with _lock:  # no other thread calls its first backward meanwhile
        if any(caller is not own for caller in _callers):
            return None
        return [None if parameter is None else grad_of(parameter) for parameter in given]


def _replace_lock() -> None:
    """Replaces the lock in a forked process: a thread of the parent's may hold it."""
    global _lock
    _lock = threading.RLock()


if hasattr(os, "register_at_fork"):  # Windows has no fork
    os.register_at_fork(after_in_child=_replace_lock)
