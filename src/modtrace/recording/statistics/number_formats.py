"""Defines number formats: their limits of underflow and overflow, and the meaning of bytes in 8-bit floats."""

import sys
from functools import cache
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from ..raw_tensor import RawTensor
from ..suggestions import did_you_mean


class NumberFormat(NamedTuple):
    """The limits of one number format, as magnitudes."""

    smallest_subnormal: float  # smaller magnitudes become zero or this number
    smallest_normal: float  # smaller magnitudes have fewer digits
    largest: float  # the largest finite number


#: IEEE 754-2019 binary32 and binary16; bfloat16, the upper half of a binary32; E4M3 (torch.float8_e4m3fn, which has no
#: infinities) and E5M2 of the OCP 8-bit Floating Point Specification, revision 1.0.
FORMATS = {
    "float32": NumberFormat(2.0**-149, 2.0**-126, (2 - 2.0**-23) * 2.0**127),
    "bf16": NumberFormat(2.0**-133, 2.0**-126, (2 - 2.0**-7) * 2.0**127),
    "fp16": NumberFormat(2.0**-24, 2.0**-14, 65504.0),
    "e4m3": NumberFormat(2.0**-9, 2.0**-6, 448.0),
    "e5m2": NumberFormat(2.0**-16, 2.0**-14, 57344.0),
}

#: The largest finite number of each dtype of floats, by torch's name of it.
LARGEST = {
    "float64": sys.float_info.max,
    "float32": FORMATS["float32"].largest,
    "bfloat16": FORMATS["bf16"].largest,
    "float16": FORMATS["fp16"].largest,
    "float8_e4m3fn": FORMATS["e4m3"].largest,
    "float8_e5m2": FORMATS["e5m2"].largest,
}

#: 8-bit floats with sign, exponent and mantissa: the number of exponent bits, the bias, the bytes without sign that are
#: NaN (128 is the negative zero of the `fnuz` kinds), and the byte that is infinite.
_SIGNED_BYTES = {
    "float8_e4m3fn": (4, 7, range(127, 128), None),
    "float8_e5m2": (5, 15, range(125, 128), 124),
    "float8_e4m3fnuz": (4, 8, range(128, 129), None),
    "float8_e5m2fnuz": (5, 16, range(128, 129), None),
}

#: All 8-bit floats, by torch's names.
FLOAT8 = (*_SIGNED_BYTES, "float8_e8m0fnu")


@cache
def float8_table(dtype: str) -> npt.NDArray[np.float64]:
    """Returns the number that each byte means in one of `FLOAT8`."""
    if dtype not in _SIGNED_BYTES:  # a format of only an exponent
        return np.append(np.exp2(np.arange(255) - 127.0), np.nan)
    exponent_bits, bias, nan, inf = _SIGNED_BYTES[dtype]
    steps = 1 << (7 - exponent_bits)  # the number of values of the mantissa
    table = np.empty(256)
    for byte in range(256):
        magnitude = byte & 127
        exponent, mantissa = divmod(magnitude, steps)
        value = (mantissa / steps + (exponent > 0)) * 2.0 ** (max(exponent, 1) - bias)
        if magnitude in nan or (byte == 128 and 128 in nan):
            value = np.nan
        elif magnitude == inf:
            value = np.inf
        table[byte] = -value if byte & 128 else value
    return table


def to_format(name: str) -> NumberFormat:
    """Returns the format with a name.

    Raises:
        ValueError: there is none; the message lists the known names.
    """
    if name in FORMATS:
        return FORMATS[name]
    hint = did_you_mean(name, FORMATS)
    raise ValueError(f"no number format {name!r}.{hint} There are: {', '.join(FORMATS)}")


def to_float64(raw: RawTensor) -> npt.NDArray[np.float64] | None:
    """Returns the elements as float64, with the parts of complex ones along a last axis; None for an unknown dtype."""
    array = raw.to_numpy()
    if raw.dtype == "bfloat16":  # the upper half of a float32
        return np.asarray((array.astype(np.uint32) << np.uint32(16)).view(np.float32), np.float64)
    if raw.dtype in FLOAT8:
        return np.asarray(float8_table(raw.dtype)[array])
    if raw.dtype == "complex32":
        return np.asarray(array.view(np.float16).reshape(*array.shape, 2), np.float64)
    if array.dtype.kind == "c":
        parts = array.view(array.real.dtype).reshape(*array.shape, 2)
        return np.asarray(parts, np.float64)
    if array.shape != raw.shape or array.dtype.kind not in "fiub":
        return None
    return np.asarray(array, np.float64)
