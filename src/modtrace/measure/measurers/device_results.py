"""Reads results from devices: from rows into which kernels write them, and in one transfer for all of a kind."""

import threading
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import numpy as np
import torch

from ...torch_internals.graph_captures import BEING_CAPTURED, graph_captures
from ...torch_internals.transforms import plain_ops
from ..moments.rows import ArrivingRows
from .want import ArrivingResults, Extra

#: Two threads do not read one row, which one of them would free. A fork, where it may be held for ever, has no device.
_reading = threading.Lock()

_NUMBERS = ("sumabs", "zero_count", "sum4", "argmax", "hash")
_ARRAYS = ("histogram", "sketch")
_OF_ARRAYS = {torch.float64, torch.float32, torch.int64}  # of what is measured; a function may return any


def read_results(extras: Iterable[Extra]) -> None:
    """Replaces what waits for its row, and tensors that hold results, by numbers, arrays and lists.

    An extra without any takes 1.5 us. A result that cannot be read becomes None, and a note says why. This waits until
    all rows have come; where there are tensors it waits for the devices, too.
    """
    unique = list({id(extra): extra for extra in extras}.values())
    if any(extra.arriving for extra in unique):
        with _reading:
            _read_rows(unique)
    read_tensors(unique)


def _read_rows(extras: Iterable[Extra]) -> None:
    """Puts what has arrived into the extras, and frees the rows."""
    by_rows: dict[ArrivingRows, list[tuple[Extra, ArrivingResults]]] = {}
    for extra in extras:
        for arriving in extra.arriving:
            by_rows.setdefault(arriving.rows, []).append((extra, arriving))
    for rows, waiting in by_rows.items():
        numbers = [arriving.row for _, arriving in waiting]
        try:
            table = rows.read(numbers)
        except RuntimeError as error:  # a device that has failed
            for extra, arriving in waiting:
                extra.lose(arriving)
                extra.add_note(f"not read from {rows.device}: {type(error).__name__}")
        else:
            for (extra, arriving), row in zip(waiting, table, strict=True):
                for part, result in arriving.read(row).items():
                    extra.put(part, result, arriving.want)
                extra.arriving.remove(arriving)
        rows.free(numbers)


def read_tensors(extras: Iterable[Extra]) -> None:
    """Replaces tensors that hold results by numbers, arrays and lists, which waits for the devices.

    While a CUDA graph is captured, there are none: they were read when the capture began.
    """
    unique = list({id(extra): extra for extra in extras}.values())
    waiting: dict[int, torch.Tensor] = {}

    def wait(tensor: torch.Tensor) -> torch.Tensor:
        waiting[id(tensor)] = tensor
        return tensor

    for extra in unique:
        _change(extra, wait)
    if waiting:
        with plain_ops(), graph_captures.device_work() as is_allowed:
            _replace(unique, _fetch(waiting) if is_allowed else {})


def _replace(extras: Iterable[Extra], fetched: Mapping[int, torch.Tensor | Exception]) -> None:
    for extra in extras:

        def read(tensor: torch.Tensor, extra: Extra = extra) -> Any:
            result = fetched.get(id(tensor))
            if isinstance(result, torch.Tensor):
                return result.numpy() if result.dim() and result.dtype in _OF_ARRAYS else result.tolist()
            reason = BEING_CAPTURED if result is None else type(result).__name__
            extra.add_note(f"not read from {tensor.device}: {reason}")
            return None

        _change(extra, read)


def _change(extra: Extra, change: Callable[[torch.Tensor], Any]) -> None:
    """Replaces each tensor by what `change` returns for it."""
    for name in (*_NUMBERS, *_ARRAYS):
        value = getattr(extra, name)
        if isinstance(value, torch.Tensor):
            setattr(extra, name, change(value))
    for by_key in (extra.channel_max, extra.sample):
        for key, value in by_key.items():
            if isinstance(value, torch.Tensor):
                by_key[key] = change(value)
    if extra.user:
        extra.user = [(function, _changed(value, change)) for function, value in extra.user]


def _changed(value: Any, change: Callable[[torch.Tensor], Any]) -> Any:
    if isinstance(value, torch.Tensor):
        changed = change(value)
        return changed.tolist() if isinstance(changed, np.ndarray) else changed
    if isinstance(value, list):
        return [_changed(item, change) for item in value]
    if isinstance(value, dict):
        return {key: _changed(item, change) for key, item in value.items()}
    return value


def _fetch(waiting: Mapping[int, torch.Tensor]) -> dict[int, torch.Tensor | Exception]:
    """Returns the tensors on the CPU, under the same numbers; an error for each that cannot be read."""
    alike: dict[Any, list[tuple[int, torch.Tensor]]] = {}
    for number, tensor in waiting.items():
        key = (tensor.device, tensor.dtype, tuple(tensor.shape))
        alike.setdefault(key, []).append((number, tensor))
    fetched: dict[int, torch.Tensor | Exception] = {}
    for group in alike.values():
        try:
            read = torch.stack([tensor for _, tensor in group]).cpu().unbind()
            fetched.update(zip((number for number, _ in group), read, strict=True))
        except Exception as error:  # a device that has failed
            fetched.update(dict.fromkeys((number for number, _ in group), error))
    return fetched
