"""Number formats, with the limits below and above which their numbers underflow and overflow."""

import sys
from typing import NamedTuple

from ..suggestions import did_you_mean


class NumberFormat(NamedTuple):
    """The limits of one format, as magnitudes."""

    smallest_subnormal: float  # what is smaller becomes zero, or this
    smallest_normal: float  # what is smaller has fewer digits
    largest: float  # finite


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


def to_format(name: str) -> NumberFormat:
    """Returns the format with a name.

    Raises:
        ValueError: there is none; the message lists the known names.
    """
    if name in FORMATS:
        return FORMATS[name]
    hint = did_you_mean(name, FORMATS)
    raise ValueError(f"no number format {name!r}.{hint} There are: {', '.join(FORMATS)}")
