"""The compiled kernel of spreads, where there is one: setup.py builds it if it finds a C compiler."""

from collections.abc import Callable

#: `(address, count, kind, target_address)`: writes 258 int64 and 3 doubles; kinds as in native.py. None: not compiled,
#: numpy measures (in 5 to 8 ns a float32 instead of 0.6).
spread_into: Callable[[int, int, int, int], None] | None

#: `(address, outer, channels, inner, size_bytes, target_address)`: writes the bits of each channel's largest magnitude.
largest_into: Callable[[int, int, int, int, int, int], None] | None

try:
    from ._spread import largest_into, spread_into
except ImportError:
    spread_into = largest_into = None
