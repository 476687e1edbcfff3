"""Measures tier 2, hash and sketch, and samples of tensors on CUDA devices, with one launch for each of these three.

Results arrive in rows, which `read_results` reads. Nobody waits for the device before.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from math import prod
from typing import Any, NamedTuple

import numpy as np
import torch

from ...errors import describe_error
from ...recording.statistics.fingerprints import SKETCH_SIZE
from ...recording.statistics.tier2 import BINS
from ...torch_internals.graph_captures import graph_captures
from ..blocks import index_in_shape
from ..cuda.cuda_kernels import FINGERPRINT, SAMPLES, TIER2, CudaKernels, Kernel, Task, find_kernels
from ..cuda.together import Together
from ..dtypes import Format, format_of
from ..memory import once_each
from ..moments.rows import Table, arriving_rows
from ..tier2.tier2 import MOST_CHANNELS, RawTier2, why_no_channels
from .want import CHANNEL_MAX, HASH, HISTOGRAM, SAMPLE, SKETCH, ArrivingResults, Extra, Want

#: What is wanted, as fingerprint.cu numbers it.
_WANTED = {HASH: 1, SKETCH: 2}

#: Elements that do not lie side by side are copied: up to this many bytes, and up to as many as are in the memory that
#: they lie in. Torch's ops go through more of them in pieces.
_MOST_COPIED_BYTES = 2**26


def has_kernels(device: torch.device) -> bool:
    """Returns whether kernels may measure tensors on a device."""
    return find_kernels(device, TIER2) is not None


class CudaExtras:
    """Launches the kernels for one recorder, on any thread."""

    def __init__(self, together: Together) -> None:
        self._together = together
        self.has_launched = False

    def measure(self, tensor: torch.Tensor, parts: Sequence[str], want: Want, extra: Extra) -> list[str]:
        """Launches the kernels for a strided tensor, if its device has them.

        Call it without modes and transforms, unless the tensor is contiguous: then no op is run.

        Args:
            tensor: the tensor. It may be freed at once, as after any op.
            parts: the fields of `extra` that are missing.
            want: what is wanted of the tensor.
            extra: holds the results, which are there when they have been read.

        Returns:
            the parts that no kernel measures.
        """
        left = list(parts)
        for kernel, plan in _PLANS.items():
            form, kernels = format_of(tensor.dtype), find_kernels(tensor.device, kernel)
            if form is None or kernels is None or not kernels.may_measure(tensor.dtype):
                continue
            planned = plan(tensor, form, left, want)
            if planned is not None and self._launch(kernels, planned, want, extra):
                left = [part for part in left if part not in planned.parts]
        return left

    def _launch(self, kernels: CudaKernels, planned: "_Planned", want: Want, extra: Extra) -> bool:
        """Returns False if nothing is launched: a CUDA graph is captured, or there is no kernel for the dtype."""
        rows = arriving_rows(kernels.device, _width_of(kernels.kernel, planned.task.channels))
        row = rows.take()
        arriving = ArrivingResults(planned.parts, want, planned.read, rows, row)
        task = planned.task._replace(row_address=rows.address(row))
        try:
            was_launched = self._start(kernels, planned.dense, task, arriving, extra)
        except Exception as error:
            rows.free([row])
            for part in planned.parts:
                extra.note_absence(part, describe_error(error), want)
            return True
        except BaseException:  # Ctrl-C may come behind the launch
            rows.free([row])
            raise
        if was_launched:
            extra.hold(arriving)
        else:
            rows.untake(row)
        return was_launched

    def _start(
        self, kernels: CudaKernels, dense: torch.Tensor, task: Task, arriving: ArrivingResults, extra: Extra
    ) -> bool:
        launches, dtype = self._together.launches, dense.dtype
        self.has_launched = True
        if launches is not None:
            result = _Held(arriving, extra)
            return launches.add(kernels, task, dense, result)
        with graph_captures.device_work(dense) as is_allowed:
            return is_allowed and kernels.measure(task, dtype)


@dataclass(eq=False, slots=True)
class _Held:
    """Results that an extra holds while they wait for their launch."""

    arriving: ArrivingResults
    extra: Extra

    def discard(self, note: str) -> None:
        """Forgets the row, which nothing writes."""
        if self.arriving in self.extra.arriving:  # Ctrl-C may have come before it was held
            self.extra.lose(self.arriving)
        self.extra.add_note(note)


class _Planned(NamedTuple):
    """What is launched for some parts of what is wanted."""

    parts: tuple[str, ...]
    dense: torch.Tensor
    task: Task  # still without the address of its row
    read: Callable[[Table], Mapping[str, Any]]  # as in `ArrivingResults`; it must not hold the tensor


def _dense(tensor: torch.Tensor) -> torch.Tensor | None:
    """Returns the tensor in row-major order; None if it is not to be copied, or no kernel can read it."""
    if not tensor.is_contiguous():
        size_bytes = tensor.numel() * tensor.element_size()
        if size_bytes > max(_MOST_COPIED_BYTES, tensor.untyped_storage().nbytes()):
            return None
        tensor = tensor.contiguous()
    return None if tensor.data_ptr() % tensor.element_size() else tensor


def _width_of(kernel: Kernel, channels: int) -> int:
    """Returns the words of the rows for a kernel's results. Those with channels have few different sizes."""
    width = kernel.row_width + (channels + 1) // 2
    return 1 << (width - 1).bit_length() if channels else width


# Tier 2. The words of a row are those of tier2.cu.


def _plan_tier2(tensor: torch.Tensor, form: Format, parts: Sequence[str], want: Want) -> _Planned | None:
    dim, shape = want.channel_dim, tuple(tensor.shape)
    has_channels = CHANNEL_MAX in parts and why_no_channels(shape, dim) is None
    if HISTOGRAM not in parts and not has_channels:
        return None
    once, repeats = once_each(tensor)
    dense = _dense(once)
    if dense is None:
        return None
    once_shape = tuple(once.shape)
    channels = once_shape[dim] if has_channels else 0
    inner = prod(once_shape[dim % len(shape) + 1 :]) * form.parts if has_channels else 0
    numbers = once.numel() * form.parts
    task = Task(dense.data_ptr(), numbers, repeats, form.parts, 0, channels=channels, inner=inner)
    wanted_parts = tuple(part for part in (HISTOGRAM, CHANNEL_MAX) if part in parts)
    held = wanted_parts if has_channels else (HISTOGRAM,)
    return _Planned(held, dense, task, partial(_read_tier2, held, shape, once_shape, dim))


def _read_tier2(
    parts: tuple[str, ...], shape: tuple[int, ...], once: tuple[int, ...], dim: int, row: Table
) -> dict[str, Any]:
    """Returns the results in a row; `once` is the shape with size 1 in each expanded dimension."""
    integers, results = row.view(np.int64), dict[str, Any]()
    if HISTOGRAM in parts:
        zeros, argmax = integers[BINS : BINS + 2].tolist()
        sumabs, sum4 = row[BINS + 2 : BINS + 4].tolist()
        index = None if argmax < 0 else index_in_shape(shape, once, argmax)
        results[HISTOGRAM] = RawTier2(sumabs, zeros, sum4, index, integers[:BINS].copy())
    if CHANNEL_MAX in parts:
        largest = row[BINS + 4 :].view(np.float32)[: once[dim]]
        results[CHANNEL_MAX] = np.repeat(largest, shape[dim] // once[dim])
    return results


# Hash and sketch. The words of a row are those of fingerprint.cu.


def _plan_fingerprint(
    tensor: torch.Tensor, form: Format, parts: Sequence[str], want: Want
) -> _Planned | None:
    held = tuple(part for part in _WANTED if part in parts)
    dense = _dense(tensor) if held else None
    if dense is None:
        return None
    wanted = sum(_WANTED[part] for part in held)
    task = Task(dense.data_ptr(), dense.numel() * form.parts, 1, form.parts, 0, wanted)
    return _Planned(held, dense, task, partial(_read_fingerprint, held))


def _read_fingerprint(parts: tuple[str, ...], row: Table) -> dict[str, Any]:
    low, high = row[SKETCH_SIZE:].view(np.int64).tolist()
    results = {HASH: high << 32 | low, SKETCH: row[:SKETCH_SIZE].copy()}
    return {part: results[part] for part in parts}


# The sample.


def _plan_sample(tensor: torch.Tensor, form: Format, parts: Sequence[str], want: Want) -> _Planned | None:
    samples = min(want.sample, tensor.numel()) * form.parts
    dense = _dense(tensor) if SAMPLE in parts and samples <= MOST_CHANNELS else None
    if dense is None:
        return None
    task = Task(dense.data_ptr(), dense.numel() * form.parts, 1, form.parts, 0, channels=samples, inner=1)

    def read(row: Table) -> dict[str, Any]:
        return {SAMPLE: row[1:].view(np.float32)[:samples].copy()}

    return _Planned((SAMPLE,), dense, task, read)


_PLANS: dict[Kernel, Callable[[torch.Tensor, Format, Sequence[str], Want], _Planned | None]] = {
    TIER2: _plan_tier2,
    FINGERPRINT: _plan_fingerprint,
    SAMPLES: _plan_sample,
}
