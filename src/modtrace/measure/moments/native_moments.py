"""The compiled kernel of the usual statistics, which setup.py builds if it finds a C compiler."""

from collections.abc import Callable

#: `(address, count, repeats, kind, row_address)`: writes the statistics of `count` contiguous numbers into
#: a row, and returns whether one of them is not finite; the row has the index of the first one only then.
#: None: not compiled, numpy measures (three times slower for large tensors, six for small ones).
measure_into: Callable[[int, int, int, int, int], bool] | None

try:
    from ._moments import measure_into
except ImportError:
    measure_into = None
