"""Raw elements in their order: what the compiled kernels know them by, and the floats that they are."""

import threading
from typing import Any

import numpy as np
import torch

from .dtypes import Floats, Format, Raw, Scratch, format_of
from .native_moments import KINDS


def kind_of(form: Format) -> int | None:
    """Returns the number by which the compiled kernels know raw elements that are floats of 16, 32 or 64 bits."""
    return _KINDS.get((np.dtype(form.raw), form.decode))


def kind_of_floats(floats: Floats) -> int:
    """Returns the same of float32 and float64."""
    return _KINDS[(floats.dtype, None)]


def to_floats(raw: Raw, form: Format) -> Floats:
    """The numbers of at most CHUNK raw elements in their order, of which the decoders of 16-bit floats take no care.

    They are gone when the next ones are asked for; those of 16-bit floats, of which there may be any number, stay.
    """
    if form.decode is None:
        return raw
    kind = kind_of(form)
    if kind == _BFLOAT16:
        return np.asarray(raw.astype(np.uint32) << np.uint32(16)).view(np.float32)
    if kind == _FLOAT16:
        return raw.view(np.float16).astype(np.float32)
    return form.decode(raw, _of_thread.scratch)


def address_of(array: Raw) -> int:
    """Returns where an array begins."""
    address: int = array.__array_interface__["data"][0]  # 0.3 us; `ctypes.data` takes 1
    return address


class _OfThread(threading.local):
    def __init__(self) -> None:
        self.scratch = Scratch()


_of_thread = _OfThread()


def _kinds() -> dict[tuple[np.dtype[Any], Any], int]:
    """Returns what the compiled kernels read, by the raw type and the decoder that they do without."""
    forms = ((format_of(dtype), kind) for dtype, kind in KINDS.items())
    return {(np.dtype(form.raw), form.decode): kind for form, kind in forms if form is not None}


_KINDS = _kinds()
_BFLOAT16, _FLOAT16 = KINDS[torch.bfloat16], KINDS[torch.float16]
