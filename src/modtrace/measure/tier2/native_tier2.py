"""The compiled kernel of tier 2, which setup.py builds if it finds a C compiler."""

from collections.abc import Callable

#: `(address, count, kind, target_address)`: writes 258 int64 and 3 doubles; kinds as in native_moments.py.
#: None: not compiled, numpy measures (in 5 to 8 ns a float32 instead of 0.6).
tier2_into: Callable[[int, int, int, int], None] | None

#: `(address, outer, channels, inner, size_bytes, target_address)`: writes the bits of each channel's largest magnitude.
largest_into: Callable[[int, int, int, int, int, int], None] | None

try:
    from ._tier2 import largest_into, tier2_into
except ImportError:
    tier2_into = largest_into = None
