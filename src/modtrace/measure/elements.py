"""Raw elements in order: the numbers of their kinds in the compiled kernels, and their conversion to floats."""

from typing import Any

import numpy as np
import torch

from .dtypes import KINDS, SCRATCH, Floats, Format, Raw, format_of


def kind_of(form: Format) -> int | None:
    """Returns the number of a format in the compiled kernels, if it is a float of 16, 32 or 64 bits; else None."""
    return _KINDS.get((np.dtype(form.raw), form.decode))


def kind_of_floats(floats: Floats) -> int:
    """Returns the number of float32 or float64 in the compiled kernels."""
    return _KINDS[(floats.dtype, None)]


def to_floats(raw: Raw, form: Format) -> Floats:
    """Converts raw elements to floats, in order; at most CHUNK of them if they need a decoder.

    The result is overwritten by the next call, except for 16-bit floats, of which there may be any number.
    """
    if form.decode is None:
        return raw
    kind = kind_of(form)
    if kind == _BFLOAT16:
        return np.asarray(raw.astype(np.uint32) << np.uint32(16)).view(np.float32)
    if kind == _FLOAT16:
        return raw.view(np.float16).astype(np.float32)
    return form.decode(raw, SCRATCH)


def address_of(array: Raw) -> int:
    """Returns the address of an array."""
    address: int = array.__array_interface__["data"][0]  # 0.3 us; `ctypes.data` takes 1
    return address


def _kinds() -> dict[tuple[np.dtype[Any], Any], int]:
    """Returns the kinds that the compiled kernels read, by raw type and decoder."""
    forms = ((format_of(dtype), kind) for dtype, kind in KINDS.items())
    return {(np.dtype(form.raw), form.decode): kind for form, kind in forms if form is not None}


_KINDS = _kinds()
_BFLOAT16, _FLOAT16 = KINDS[torch.bfloat16], KINDS[torch.float16]
