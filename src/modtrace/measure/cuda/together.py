"""Launches one kernel for many tensors, at the end of a block."""

import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, Protocol

import torch

from ...errors import describe_error
from ...torch_internals.graph_captures import graph_captures
from ..special import NOT_MEASURED_IN_GRAPH, shortened
from .cuda_kernels import CudaKernels, Task


class Discardable(Protocol):
    """The result of a launch."""

    def discard(self, note: str) -> None:
        """Forgets the row, which nothing has written or will write; the note says why. The row is not used again."""


class Together:
    """The tensors that each thread measures together."""

    def __init__(self) -> None:
        self.by_thread: dict[int, Launches] = {}

    @property
    def launches(self) -> "Launches | None":
        """What this thread collects; None outside of a block."""
        return self.by_thread.get(threading.get_ident()) if self.by_thread else None

    @contextmanager
    def block(self) -> Iterator[None]:
        """Measures tensors that this thread gives inside the block at its end, with one launch for each dtype.

        Nothing may write to them before. What no kernel measures as it lies in memory is measured at once.
        """
        me = threading.get_ident()
        outer, launches = self.by_thread.get(me), Launches()
        self.by_thread[me] = launches
        try:
            yield
        finally:
            if outer is None:
                del self.by_thread[me]
            else:
                self.by_thread[me] = outer
            launches.launch()


class Launches:
    """The tensors that are measured at the end of a block."""

    def __init__(self) -> None:
        self._batches: dict[tuple[CudaKernels, torch.dtype], Any] = {}  # None: no kernel
        #: The same of the usual statistics, for a `Launcher` of _cuda_launch.c.
        self.moment_batches: dict[torch.device, dict[torch.dtype, Any]] = {}

    def prepare(self, tensor: torch.Tensor, kernels: CudaKernels) -> bool:
        """Returns whether a launcher can add tensors like this one from now on."""
        batch = self._batch(kernels, tensor.dtype)
        self.moment_batches.setdefault(tensor.device, {})[tensor.dtype] = batch
        return batch is not None

    def add(self, kernels: CudaKernels, task: Task, tensor: torch.Tensor, result: Discardable) -> bool:
        """Adds dense memory. Returns False, and adds nothing, if the dtype has no kernel or a graph is captured.

        Args:
            kernels: what it measures.
            task: the memory.
            tensor: the tensor that it belongs to, which is kept alive until the launch.
            result: what is discarded if the launch fails.
        """
        batch = self._batch(kernels, tensor.dtype)
        if batch is not None:
            batch.add(task, tensor, result)
        return batch is not None

    def launch(self) -> None:
        """Launches a kernel for each dtype and device. Where that fails, a note says so."""
        with ExitStack() as stack:  # each is launched, also if Ctrl-C interrupts another; the last one first
            for (kernels, _), batch in reversed(self._batches.items()):
                if batch is not None:
                    stack.callback(_launch, kernels, batch)

    def _batch(self, kernels: CudaKernels, dtype: torch.dtype) -> Any:
        key = kernels, dtype
        if key not in self._batches:
            with graph_captures.device_work() as is_allowed:  # a program may be loaded
                self._batches[key] = kernels.new_batch(dtype) if is_allowed else None
        return self._batches[key]


def _launch(kernels: CudaKernels, batch: Any) -> None:
    note: str | None = "not measured: interrupted"
    try:
        with graph_captures.device_work() as is_allowed:
            was_launched = is_allowed and kernels.launch(batch)
        note = None if was_launched else NOT_MEASURED_IN_GRAPH
    except Exception as error:
        note = shortened(f"not measured: {describe_error(error)}")
    finally:
        for result in batch.results if note is not None else ():
            result.discard(note or "")
