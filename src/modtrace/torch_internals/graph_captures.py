"""Keeps our work on devices out of the CUDA graphs that the program captures.

While one thread captures a graph, a synchronization, a copy to the host, an allocation or the query of an event ends
the capture, from whichever thread it comes (`cudaErrorStreamCaptureInvalidated`; torch 2.11, H100). What is launched on
the capturing stream does not run at all: it runs at each replay, in memory that belongs to the graph.

A graph that Python's garbage collector frees ends the capture, too ("not permitted when stream is capturing"), and what
we allocate would start the collector: `torch.cuda.graph` collects before a capture, and we keep it from running until
the capture has ended.

So nothing of ours works on a device while a graph is captured. What lies on devices is fetched right before a capture
begins, so that all that was measured can be written meanwhile, and no thread has to wait for the end of a capture.
"""

import functools
import gc
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple, Protocol

import torch

from .patches import replace
from .tensors import is_on_device

#: The note of a row about values that are missing because of a capture.
BEING_CAPTURED = "a CUDA graph was being captured"

#: The longest time that a beginning capture waits for our work to end, and that a user's request waits for a capture to
#: end.
_PATIENCE_S = 10.0


class OnDevices(Protocol):
    """Holds results that lie on devices."""

    def fetch(self) -> None:
        """Copies the results to the host; it raises no `Exception`, and nothing else works on a device meanwhile."""


class GraphCaptures:
    """The captures of CUDA graphs in this process that are begun by torch's Python classes.

    These classes are wrapped while there is a watcher.
    """

    def __init__(self) -> None:
        self._wrapped: list[_Wrapped] = []
        self._reset()

    def _reset(self) -> None:
        self._changed = threading.Condition()  # guards the following attributes; held only briefly
        self._open: list[_OpenCapture] = []
        #: Whether a capture has begun and not ended. It is read without a lock.
        self.may_be_open = False
        self._beginning: int | None = None  # the thread that is about to begin a capture
        self._working: list[int] = []  # the threads on which we use a device, once for each nested use
        self._on_devices: weakref.WeakSet[OnDevices] = weakref.WeakSet()
        self._watchers: list[object] = []
        self._has_paused_collector = False

    def watch(self, watcher: object) -> None:
        """Watches captures until `unwatch(watcher)`."""
        with self._changed:
            self._watchers.append(watcher)
            if not self._wrapped:
                self._wrapped = [_Wrapped(kind, self._begin, self._end) for kind in _graph_classes()]

    def unwatch(self, watcher: object) -> None:
        """Restores the classes of torch if there is no other watcher. It does nothing if `watcher` does not watch."""
        with self._changed:
            self._watchers = [other for other in self._watchers if other is not watcher]
            if not self._watchers:
                self._restore()

    def abandon(self) -> None:
        """Restores the classes of torch, because this process is a fork. It takes no lock."""
        self._restore()
        self._reset()  # a thread of the parent may hold the lock

    def _restore(self) -> None:
        for wrapped in self._wrapped:
            wrapped.restore()
        self._wrapped = []
        self._set_open([])

    def _set_open(self, captures: "list[_OpenCapture]") -> None:
        """Sets the captures in progress, and suspends the garbage collector while there are any."""
        self._open, self.may_be_open = captures, bool(captures)
        if captures and not self._has_paused_collector and gc.isenabled():
            gc.disable()
            self._has_paused_collector = True
        elif self._has_paused_collector and not captures:
            gc.enable()
            self._has_paused_collector = False

    def add(self, results: OnDevices) -> None:
        """Fetches these results before each capture, as long as the object lives."""
        with self._changed:
            self._on_devices.add(results)

    def clone(self, tensor: torch.Tensor) -> torch.Tensor:
        """Returns a copy of a tensor without its graph; the tensor itself if copying would end a capture."""
        with self.device_work(tensor) as is_allowed:
            return tensor.detach().clone() if is_allowed else tensor

    @contextmanager
    def device_work(self, tensor: torch.Tensor | None = None, *, waits: bool = False) -> Iterator[bool]:
        """Yields whether a device may be used in the block, during which no capture begins; this takes 2 us.

        Args:
            tensor: the tensor to work on, which is always allowed in main memory; None for any device.
            waits: whether to wait for captures on other threads to end, in which case no lock of ours may be held.
        """
        if tensor is not None and not is_on_device(tensor):
            yield True
            return
        me = threading.get_ident()
        may_work = False
        try:
            with self._changed:
                if me in self._working or me == self._beginning or self._is_free(me, waits):
                    may_work = True
                    self._working.append(me)
            yield may_work
        finally:
            if may_work:
                with self._changed:
                    self._working.remove(me)
                    self._changed.notify_all()

    def _is_free(self, me: int, waits: bool) -> bool:
        """Returns whether no graph is being captured, after a beginning capture has fetched what it needs."""
        self._changed.wait_for(lambda: self._beginning is None, _PATIENCE_S)
        if _is_captured_here():
            return False
        if waits and self._is_any_open() and all(capture.thread.ident != me for capture in self._open):
            until_s = max(capture.since_s for capture in self._open) + _PATIENCE_S
            self._changed.wait_for(
                lambda: self._beginning is None and not self._is_any_open(),
                max(0, until_s - time.monotonic()),
            )
        return self._beginning is None and not self._is_any_open()

    def _is_any_open(self) -> bool:
        """Returns whether a graph is being captured. A capture whose thread or graph is gone no longer counts."""
        if self._open:
            self._set_open([capture for capture in self._open if capture.can_end()])
        return bool(self._open)

    # Functions that the wrapped classes call.

    def _begin(self, graph: Any) -> None:
        """Waits until our work on devices has ended, and fetches the results that are on them."""
        me = threading.get_ident()
        capture = _OpenCapture(weakref.ref(graph), threading.current_thread(), time.monotonic())
        try:
            with self._changed:
                self._changed.wait_for(lambda: self._beginning in (None, me), _PATIENCE_S)
                is_first = not self._is_any_open()
                self._set_open([*self._open, capture])
                self._beginning = me
                self._changed.wait_for(lambda: all(thread == me for thread in self._working), _PATIENCE_S)
                # Nothing was measured since another capture began.
                waiting = list(self._on_devices) if is_first else []
            for results in waiting:
                results.fetch()
        except BaseException:  # Ctrl-C
            self._end(graph)
            raise
        finally:
            with self._changed:
                self._beginning = None if self._beginning == me else self._beginning
                self._changed.notify_all()

    def _end(self, graph: Any) -> None:
        with self._changed:
            self._set_open([capture for capture in self._open if capture.graph() is not graph])
            self._changed.notify_all()


class _OpenCapture(NamedTuple):
    graph: "weakref.ref[Any]"
    thread: threading.Thread
    since_s: float

    def can_end(self) -> bool:
        return self.graph() is not None and self.thread.is_alive()


class _Wrapped:
    """A class of graphs, with wrapped methods for beginning and ending a capture."""

    def __init__(self, kind: Any, began: Callable[[Any], None], ended: Callable[[Any], None]) -> None:
        self._is_restored = False
        begin, end = kind.capture_begin, kind.capture_end

        @functools.wraps(begin)
        def capture_begin(graph: Any, *args: Any, **kwargs: Any) -> Any:
            if self._is_restored:  # other code has wrapped our wrapper
                return begin(graph, *args, **kwargs)
            began(graph)
            try:
                return begin(graph, *args, **kwargs)
            except BaseException:
                ended(graph)
                raise

        @functools.wraps(end)
        def capture_end(graph: Any, *args: Any, **kwargs: Any) -> Any:
            try:
                return end(graph, *args, **kwargs)
            finally:
                ended(graph)

        self._patches = ExitStack()
        replace(kind, "capture_begin", capture_begin, self._patches)
        replace(kind, "capture_end", capture_end, self._patches)

    def restore(self) -> None:
        """Restores the methods."""
        self._is_restored = True
        self._patches.close()


def _graph_classes() -> list[Any]:
    """Returns the classes of torch that capture CUDA graphs; none where torch is built without CUDA.

    torch uses the first class for all its graphs: `torch.cuda.graph`, `make_graphed_callables` and inductor. The second
    came with torch 2.13.
    """
    if not _is_built():
        return []
    found = [torch.cuda.CUDAGraph, getattr(getattr(torch, "accelerator", None), "Graph", None)]
    return [kind for kind in found if hasattr(kind, "capture_begin") and hasattr(kind, "capture_end")]


def _is_captured_here() -> bool:
    """Returns whether work issued on this thread is captured, even in a backward, which has a thread of its own.

    If CUDA is not in use, nothing is captured; without a driver torch would raise when asked (2.11).
    """
    return _is_in_use() and torch.cuda.is_current_stream_capturing()


def _is_in_use() -> bool:
    is_in_use: bool = _is_built() and torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
    return is_in_use


def _is_built() -> bool:
    """Returns whether torch is built with CUDA or ROCm, without initializing anything."""
    is_built: bool = torch.backends.cuda.is_built()  # type: ignore[no-untyped-call]
    return is_built


#: The captures of this process.
graph_captures = GraphCaptures()
