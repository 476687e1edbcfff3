"""Measures what is wanted of a tensor beyond its usual statistics, or notes why it cannot; never raises."""

import weakref
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import torch

from ...errors import describe_error
from ...torch_internals.graph_captures import graph_captures
from ...torch_internals.modes import tracing_state
from ...torch_internals.tensors import is_on_device, kind_of, plain_kinds
from ...torch_internals.transforms import plain_ops
from ..cuda.together import Together
from ..dtypes import Format, Raw, format_of
from ..fingerprints.device_fingerprints import hash_on_device, sketch_on_device
from ..fingerprints.fingerprints import Shard, fingerprint_array
from ..memory import is_held, logical_array, too_many
from ..special import NOT_MEASURED_IN_GRAPH, find_plain, is_uninitialized, shortened
from ..tier2.device_tier2 import channel_max_on_device, sample_on_device, tier2_on_device
from ..tier2.tier2 import channel_max_array, sample_array, tier2_array
from .cuda_extras import CudaExtras, has_kernels
from .device_results import read_tensors
from .measurer import why_not
from .user_functions import UserFunctions, name_of
from .want import CHANNEL_MAX, HASH, HISTOGRAM, SAMPLE, SKETCH, Extra, Want


class Extras:
    """Measures extra results for one recorder, on any thread."""

    def __init__(self, functions: UserFunctions, together: Together | None = None) -> None:
        self._plain = plain_kinds()
        self._with_kernels: tuple[int, ...] = ()  # the kinds of plain tensors on the device that was met last
        self._functions = functions
        self._kernels = CudaExtras(together or Together())
        self._on_devices: weakref.WeakSet[Extra] = weakref.WeakSet()  # whose results may lie on a device
        graph_captures.add(self)

    @property
    def has_launched(self) -> bool:
        """True if kernels were launched: reading their results waits until they have come."""
        return self._kernels.has_launched

    def fetch(self) -> None:
        """Copies all results that lie on devices to the host. Those that arrive by themselves need no copy."""
        read_tensors(list(self._on_devices))
        self._on_devices.clear()

    def measure(self, tensor: torch.Tensor, want: Want, extra: Extra) -> None:
        """Adds what is wanted and missing, except for whole tensors. Call it inside `DisableTorchFunction()`.

        For a tensor that is not plain, the part that `find_plain` finds is measured, and passed to functions. A tensor
        on another device is measured there, without waiting for it.
        """
        if not want.functions and not _missing_parts(want, extra):
            return
        try:
            if is_plain(tensor, self._plain):
                self._measure(tensor, want, extra, None)
            elif want.functions or not self._are_launched(tensor, want, extra):
                self._measure_special(tensor, want, extra)
        except Exception as error:  # a subclass of the user's
            extra.add_note(shortened(f"not measured: {describe_error(error)}"))

    def _are_launched(self, tensor: torch.Tensor, want: Want, extra: Extra) -> bool:
        """Returns whether kernels measure all that is missing of a plain tensor, for which no op is run."""
        if graph_captures.may_be_open or not is_plain(tensor, self._with_kernels):
            return False
        if not tensor.is_contiguous() or not is_held(tensor):
            return False
        form = format_of(tensor.dtype)
        extra.add_note(None if form is None else form.note)
        return not self._kernels.measure(tensor, _missing_parts(want, extra), want, extra)

    def _measure_special(self, tensor: torch.Tensor, want: Want, extra: Extra) -> None:
        with plain_ops(), graph_captures.device_work(tensor) as is_allowed:
            if not is_allowed:
                extra.add_note(NOT_MEASURED_IN_GRAPH)
                return
            if is_on_device(tensor):
                self._on_devices.add(extra)
                self._with_kernels = plain_kinds(tensor.device.type) if has_kernels(tensor.device) else ()
            plain = find_plain(tensor)
            if plain.tensor is not None:
                at = plain.shard and Shard(plain.shard.global_shape, plain.shard.global_offset)
                self._measure(plain.tensor, want, extra, plain.note, at)
            else:
                extra.add_note(shortened(plain.note))

    def _measure(
        self, tensor: torch.Tensor, want: Want, extra: Extra, note: str | None, shard: Shard | None = None
    ) -> None:
        parts, form = _missing_parts(want, extra), format_of(tensor.dtype)
        if not is_held(tensor) or (parts and form is None):
            extra.add_note(why_not(tensor))
        else:
            extra.add_note(shortened(note))
            if parts and form is not None:
                extra.add_note(form.note)
                self._measure_parts(tensor, form, parts, want, extra, shard)
        if want.functions and is_held(tensor):
            self._call_functions(tensor, want, extra)

    def _measure_parts(
        self,
        tensor: torch.Tensor,
        form: Format,
        parts: list[str],
        want: Want,
        extra: Extra,
        shard: Shard | None,
    ) -> None:
        bounded = []
        for part in parts:
            reason = None if part == SAMPLE else too_many(tensor, once=part in (HISTOGRAM, CHANNEL_MAX))
            if reason is None:
                bounded.append(part)
            else:
                extra.note_absence(part, reason, want)
        if is_on_device(tensor):
            by_ops = [
                part for part in bounded if shard is not None and part in (HASH, SKETCH)
            ]  # no kernel knows shards
            by_kernels = [part for part in bounded if part not in by_ops]
            missed = self._kernels.measure(tensor, by_kernels, want, extra)
            _measure_device(tensor, [*missed, *by_ops], want, extra, shard)
        else:
            _measure_host(tensor, form, bounded, want, extra, shard)

    def _call_functions(self, tensor: torch.Tensor, want: Want, extra: Extra) -> None:
        reason = too_many(tensor)
        if reason is None:
            self._functions.call(tensor, want.functions, extra)
        for function in want.functions if reason is not None else ():
            extra.add_note(shortened(f"function {name_of(function)} not called: {reason}"), "user", function)


def is_plain(tensor: torch.Tensor, kinds: tuple[int, ...]) -> bool:
    """Returns whether numpy can read a tensor's numbers in CPU memory, unseen by any tracer.

    Args:
        tensor: the tensor.
        kinds: `plain_kinds()`.
    """
    return kind_of(tensor) in kinds and not is_uninitialized(tensor) and tracing_state() is None


_FINGERPRINT = "hash and sketch"


def _missing_parts(want: Want, extra: Extra) -> list[str]:
    is_missing = {
        HISTOGRAM: want.stats > 1 and extra.histogram is None,
        CHANNEL_MAX: want.stats > 1 and want.channel_dim not in extra.channel_max,
        SAMPLE: want.sample and want.sample not in extra.sample,
        HASH: want.hash and extra.hash is None,
        SKETCH: want.sketch and extra.sketch is None,
    }
    return [part for part, missing in is_missing.items() if missing]


def _measure_host(
    tensor: torch.Tensor, form: Format, parts: list[str], want: Want, extra: Extra, shard: Shard | None
) -> None:
    array = logical_array(tensor)
    if array is None:
        extra.add_note(why_not(tensor))
        return
    if HASH in parts and SKETCH in parts:  # one pass is hardly dearer than either
        parts = [part for part in parts if part not in (HASH, SKETCH)] + [_FINGERPRINT]
    with np.errstate(all="ignore"):  # a handler of `np.seterrcall` is not called for errors of ours
        for part in parts:
            _add(part, partial(_ON_HOST[part], array, form, want, shard), want, extra)


def _measure_device(
    tensor: torch.Tensor, parts: list[str], want: Want, extra: Extra, shard: Shard | None
) -> None:
    for part in parts:
        _add(part, partial(_ON_DEVICE[part], tensor, want, shard), want, extra)


def _add(part: str, measure: Callable[[], Any], want: Want, extra: Extra) -> None:
    try:
        result = measure()
    except Exception as error:
        result = describe_error(error)
    if isinstance(result, str):
        for missing in (HASH, SKETCH) if part == _FINGERPRINT else (part,):
            extra.note_absence(missing, result, want)
    elif part == _FINGERPRINT:
        extra.hash, extra.sketch = result
    else:
        extra.put(part, result, want)


_ON_HOST: dict[str, Callable[[Raw, Format, Want, Shard | None], Any]] = {
    HISTOGRAM: lambda array, form, want, shard: tier2_array(array, form),
    CHANNEL_MAX: lambda array, form, want, shard: channel_max_array(array, form, want.channel_dim),
    SAMPLE: lambda array, form, want, shard: sample_array(array, form, want.sample),
    HASH: lambda array, form, want, shard: fingerprint_array(array, None, shard=shard).hash,
    SKETCH: lambda array, form, want, shard: (
        fingerprint_array(array, form, shard=shard, is_hashed=False).sketch
    ),
    _FINGERPRINT: lambda array, form, want, shard: fingerprint_array(array, form, shard=shard),
}

_ON_DEVICE: dict[str, Callable[[torch.Tensor, Want, Shard | None], Any]] = {
    HISTOGRAM: lambda tensor, want, shard: tier2_on_device(tensor),
    CHANNEL_MAX: lambda tensor, want, shard: channel_max_on_device(tensor, want.channel_dim),
    SAMPLE: lambda tensor, want, shard: sample_on_device(tensor, want.sample),
    HASH: lambda tensor, want, shard: hash_on_device(tensor, shard=shard),
    SKETCH: lambda tensor, want, shard: sketch_on_device(tensor, shard=shard),
}
