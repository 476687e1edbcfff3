"""Launches one kernel for many tensors, at the end of a block."""

import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple, Protocol

import torch

from ..errors import describe_error
from ..torch_internals.graph_captures import graph_captures
from .cuda_kernels import CudaKernels
from .notes import NOT_MEASURED_IN_GRAPH, shortened


class Discardable(Protocol):
    """The result of a launch."""

    def discard(self, note: str) -> None:
        """Forgets the row, which nothing has written or will write; the note says why. The row is not used again."""


class Together:
    """The tensors that each thread measures together."""

    def __init__(self) -> None:
        self._launches: dict[int, Launches] = {}  # by thread

    @property
    def launches(self) -> "Launches | None":
        """What this thread collects; None outside of a block."""
        return self._launches.get(threading.get_ident()) if self._launches else None

    @contextmanager
    def block(self) -> Iterator[None]:
        """Measures tensors that this thread gives inside the block at its end, with one launch for each dtype.

        Nothing may write to them before. What no kernel measures as it lies in memory is measured at once.
        """
        me = threading.get_ident()
        outer, launches = self._launches.get(me), Launches()
        self._launches[me] = launches
        try:
            yield
        finally:
            if outer is None:
                del self._launches[me]
            else:
                self._launches[me] = outer
            launches.launch()


class Launches:
    """The tensors that are measured at the end of a block."""

    def __init__(self) -> None:
        self._batches: dict[torch.dtype, dict[CudaKernels, _Batch | None]] = {}

    def add(
        self, kernels: CudaKernels, tensor: torch.Tensor, result: Discardable, add: Callable[[Any], bool]
    ) -> bool:
        """Adds a tensor by `add`, which is given a `Batch` of _cuda_launch.c, and whose answer is returned.

        It returns False, too, if the dtype has no kernel.
        """
        batches = self._batches.setdefault(tensor.dtype, {})
        if kernels not in batches:
            new = kernels.new_batch(tensor.dtype)
            batches[kernels] = None if new is None else _Batch(new, [], [])
        batch = batches[kernels]
        if batch is None:
            return False
        batch.tensors.append(tensor)
        batch.results.append(result)
        is_added = False
        try:
            is_added = add(batch.tasks)
        finally:
            if not is_added:
                batch.tensors.pop()
                batch.results.pop()
        return is_added

    def launch(self) -> None:
        """Launches a kernel for each dtype and device. Where that fails, a note says so."""
        every = [item for batches in self._batches.values() for item in batches.items()]
        with ExitStack() as stack:  # each is launched, also if Ctrl-C interrupts another; the last one first
            for kernels, batch in reversed(every):
                if batch is not None:
                    stack.callback(batch.launch, kernels)


class _Batch(NamedTuple):
    """Tensors of one dtype on one device."""

    tasks: Any  # `Batch` of _cuda_launch.c
    results: list[Discardable]
    tensors: list[torch.Tensor]  # their memory must not be freed before the launch

    def launch(self, kernels: CudaKernels) -> None:
        note: str | None = "not measured: interrupted"
        try:
            with graph_captures.device_work() as is_allowed:
                was_launched = is_allowed and kernels.launch(self.tasks)
            note = None if was_launched else NOT_MEASURED_IN_GRAPH
        except Exception as error:
            note = shortened(f"not measured: {describe_error(error)}")
        finally:
            for result in self.results if note is not None else ():
                result.discard(note or "")
