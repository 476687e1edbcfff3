"""Number formats, with the limits below and above which their numbers underflow and overflow."""

import sys
from dataclasses import dataclass

from ..suggestions import did_you_mean


@dataclass(frozen=True, kw_only=True)
class NumberFormat:
    """The limits of one format, as magnitudes."""

    name: str
    smallest_subnormal: float  # what is smaller becomes zero, or this
    smallest_normal: float  # what is smaller has fewer digits
    largest: float  # finite


#: IEEE 754-2019 binary32 and binary16; bfloat16, the upper half of a binary32; E4M3 (torch.float8_e4m3fn, which has no
#: infinities) and E5M2 of the OCP 8-bit Floating Point Specification, revision 1.0.
FORMATS = {
    each.name: each
    for each in (
        NumberFormat(
            name="float32",
            smallest_subnormal=2.0**-149,
            smallest_normal=2.0**-126,
            largest=(2 - 2.0**-23) * 2.0**127,
        ),
        NumberFormat(
            name="bf16",
            smallest_subnormal=2.0**-133,
            smallest_normal=2.0**-126,
            largest=(2 - 2.0**-7) * 2.0**127,
        ),
        NumberFormat(name="fp16", smallest_subnormal=2.0**-24, smallest_normal=2.0**-14, largest=65504.0),
        NumberFormat(name="e4m3", smallest_subnormal=2.0**-9, smallest_normal=2.0**-6, largest=448.0),
        NumberFormat(name="e5m2", smallest_subnormal=2.0**-16, smallest_normal=2.0**-14, largest=57344.0),
    )
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
