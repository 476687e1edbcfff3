"""Watches how long a program waits for data loaders: for the next batch, and for workers to start."""

import functools
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

from torch.utils.data import DataLoader, dataloader

from .dynamo import keep_out_of_dynamo
from .own_frames import leave_out_own_frames
from .patches import replace

#: Receives the dataset, how many workers its loader has, and when a wait began and ended, on the thread that waited.
LoaderListener = Callable[[Any, int, int, int], None]

_listeners: list[LoaderListener] = []
_patches = ExitStack()  # closed when there is no listener


class _Thread(threading.local):
    """Whether this thread waits for a data loader; a loader inside of another one is a part of that wait."""

    is_waiting = False


_thread = _Thread()


def watch_loaders(listener: LoaderListener) -> None:
    """Notifies a listener of each wait for a data loader, on any thread, until `unwatch_loaders`.

    Methods of classes are replaced, so iterators that exist already are seen.
    """
    _listeners.append(listener)
    if len(_listeners) > 1:
        return
    iterators = getattr(dataloader, "_BaseDataLoaderIter", None)
    if iterators is not None:
        _wrap(iterators, "__next__", "_dataset", "_num_workers")
    _wrap(DataLoader, "__iter__", "dataset", "num_workers")


def unwatch_loaders(listener: LoaderListener) -> None:
    """Removes a listener, and what was replaced with the last one."""
    if listener in _listeners:
        _listeners.remove(listener)
    if not _listeners:
        _patches.close()
        _thread.is_waiting = False  # a worker is forked in a wait


def _wrap(holder: type, name: str, dataset: str, workers: str) -> None:
    """Wraps a method that takes no arguments; the other names are those of attributes."""
    original = vars(holder)[name]
    clock = time.perf_counter_ns

    @functools.wraps(original)
    def method(self: Any) -> Any:
        if _thread.is_waiting or not _listeners:
            return original(self)
        start_ns = clock()
        try:
            _thread.is_waiting = True
            return original(self)
        except BaseException as error:
            leave_out_own_frames(error)
            raise
        finally:
            end_ns = clock()
            _thread.is_waiting = False
            for listener in tuple(_listeners):
                listener(getattr(self, dataset, None), getattr(self, workers, 0), start_ns, end_ns)

    keep_out_of_dynamo(method, with_callees=False)
    replace(holder, name, method, _patches)
