"""The formats of dtypes in memory, and the conversion of their elements to numbers that numpy can reduce."""

import sys
import threading
from collections.abc import Callable
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from ..recording.statistics.number_formats import FLOAT8, float8_table

#: Elements that are turned into floats at a time, so that they stay in the cache of a core.
CHUNK = 131_072

Raw = npt.NDArray[Any]
Floats = npt.NDArray[Any]  # float32 or float64


class Scratch(threading.local):
    """The buffers in which a thread converts elements to floats. Each is created when it is first needed."""

    @cached_property
    def float32(self) -> npt.NDArray[np.float32]:
        """The buffer of CHUNK float32."""
        return np.zeros(CHUNK, np.float32)

    @cached_property
    def float64(self) -> npt.NDArray[np.float64]:
        """The buffer of CHUNK float64."""
        return np.zeros(CHUNK, np.float64)


#: What is in it is overwritten by the next conversion on the same thread.
SCRATCH = Scratch()

#: The dtypes that compiled kernels read, and their numbers there. Others are measured by numpy.
KINDS = {
    torch.float32: 0,
    torch.bfloat16: 1,
    torch.float16: 2,
    torch.float64: 3,
    torch.complex64: 0,
    torch.complex32: 2,
    torch.complex128: 3,
}

Decoder = Callable[[Raw, Scratch], Floats]


class Format(NamedTuple):
    """The format of a dtype: numpy's type of its raw elements, how many of them make one element, and their decoder."""

    raw: npt.DTypeLike
    parts: int = 1  # 2 for complex numbers: the real and the imaginary part are numbers of their own
    decode: Decoder | None = None  # None: the raw elements are floats already

    @property
    def note(self) -> str | None:
        """The note that accompanies the statistics; None if there is nothing to say."""
        return "complex: real and imaginary parts" if self.parts == 2 else None


def format_of(dtype: torch.dtype) -> Format | None:
    """Returns the format of a dtype; None for those that cannot be measured (quantised, or of fewer than 8 bits)."""
    return _FORMATS.get(dtype)


# Decoders. Times are for 131,072 elements on one core of a shared Xeon, where `x.sum()` of as many float32 takes 6 us.


def _to_float32(raw: Raw, scratch: Scratch) -> Floats:
    floats = scratch.float32[: len(raw)]
    np.copyto(floats, raw)
    return floats


def _to_float64(raw: Raw, scratch: Scratch) -> Floats:
    floats = scratch.float64[: len(raw)]
    np.copyto(floats, raw, casting="unsafe")  # int64 beyond 2^53 is rounded
    return floats


def _from_bfloat16(raw: Raw, scratch: Scratch) -> Floats:
    """Converts bfloat16 elements, which are the upper halves of float32; their order may change.

    Converting them in pairs takes 8 us, and each alone 22 us.
    """
    floats = scratch.float32[: len(raw)]
    bits = floats.view(np.uint32)
    pairs, half = _pairs(raw), len(raw) // 2
    if pairs is None:
        np.copyto(bits, raw)
        np.left_shift(bits, _SIXTEEN, out=bits)
        return floats
    np.bitwise_and(pairs, _UPPER, out=bits[:half])
    np.left_shift(pairs, _SIXTEEN, out=bits[half : 2 * half])
    if len(raw) % 2:
        bits[-1] = np.uint32(raw[-1]) << _SIXTEEN
    return floats


def _from_float16(raw: Raw, scratch: Scratch) -> Floats:
    """Shifts the bits to their positions in float32, and corrects the bias of the exponent; the order may change.

    The largest exponent means infinity or NaN in a float16, and becomes a number of 2^16 or more here. In that case
    numpy converts the chunk again, which takes 125 us. (With `set_flush_denormal(True)` subnormals are 0.)
    """
    floats = scratch.float32[: len(raw)]
    bits = floats.view(np.int32)
    pairs, half = _pairs(raw), len(raw) // 2
    if pairs is None:
        np.copyto(bits, raw)
        np.left_shift(bits, _SIXTEEN_SIGNED, out=bits)
    else:
        np.copyto(bits[:half], pairs.view(np.int32))
        np.left_shift(pairs.view(np.int32), _SIXTEEN_SIGNED, out=bits[half : 2 * half])
        if len(raw) % 2:
            bits[-1] = np.int32(raw[-1:].view(np.int16)[0]) << _SIXTEEN_SIGNED
    np.right_shift(bits, _THREE, out=bits)
    np.bitwise_and(bits, _FLOAT16_BITS, out=bits)
    np.multiply(floats, _FLOAT16_BIAS, out=floats)
    if np.maximum.reduce(floats) >= _FLOAT16_END or np.minimum.reduce(floats) <= -_FLOAT16_END:
        np.copyto(floats, raw.view(np.float16))
    return floats


def _pairs(raw: Raw) -> npt.NDArray[np.uint32] | None:
    """Returns a view of each two elements of 16 bits as one of 32; None if memory is not contiguous or aligned."""
    if sys.byteorder != "little" or not raw.flags.c_contiguous:
        return None
    pairs = raw[: len(raw) - len(raw) % 2].view(np.uint32)
    return pairs if pairs.flags.aligned else None


_SIXTEEN, _UPPER = np.uint32(16), np.uint32(0xFFFF0000)
_SIXTEEN_SIGNED, _THREE = np.int32(16), np.int32(3)
_FLOAT16_BITS = np.int32(-0x70002000)  # 0x8FFFE000: sign, exponent and mantissa
_FLOAT16_BIAS = np.float32(2.0**112)  # the biases are 15 and 127
_FLOAT16_END = 2.0**16


def _by_table(table: npt.NDArray[np.float32]) -> Decoder:
    def decode(raw: Raw, scratch: Scratch) -> Floats:
        floats = scratch.float32[: len(raw)]
        np.take(table, raw, out=floats, mode="clip")  # 90 us; `clip` because `raise` buffers the output
        return floats

    return decode


_FORMATS = {
    torch.float32: Format(np.float32),
    torch.float64: Format(np.float64),
    torch.bfloat16: Format(np.uint16, decode=_from_bfloat16),
    torch.float16: Format(np.uint16, decode=_from_float16),
    torch.complex64: Format(np.float32, parts=2),
    torch.complex128: Format(np.float64, parts=2),
    torch.complex32: Format(np.uint16, parts=2, decode=_from_float16),
    torch.bool: Format(np.bool_, decode=_to_float32),  # any byte except 0 is True, as in torch
    torch.uint8: Format(np.uint8, decode=_to_float32),
    torch.int8: Format(np.int8, decode=_to_float32),
    torch.uint16: Format(np.uint16, decode=_to_float32),
    torch.int16: Format(np.int16, decode=_to_float32),
    torch.uint32: Format(np.uint32, decode=_to_float64),
    torch.int32: Format(np.int32, decode=_to_float64),
    torch.uint64: Format(np.uint64, decode=_to_float64),
    torch.int64: Format(np.int64, decode=_to_float64),
    **{
        getattr(torch, name): Format(np.uint8, decode=_by_table(float8_table(name).astype(np.float32)))
        for name in FLOAT8
    },
}


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
