"""Finds the first element of an array that is NaN or infinite, in row-major order."""

import numpy as np

from ..blocks import blocks, in_row, index_in_whole, without_repeats
from ..dtypes import CHUNK, Format, Raw
from ..elements import to_floats


def first_nonfinite(array: Raw, form: Format) -> int:
    """Returns the row-major index of the first element that is NaN or infinite; -1 if none is.

    It is only called for tensors that have such an element, and reads no further than to it.

    Args:
        array: raw elements of the dtype in the tensor's shape, of any strides; complex numbers have a last axis of 2
            parts.
        form: their format.
    """
    once, _ = without_repeats(array)
    start = 0
    for block in blocks(once.shape, CHUNK):
        raw = in_row(once[block])
        found = np.flatnonzero(~np.isfinite(to_floats(raw, form)))
        if len(found):
            return index_in_whole(array, once, (start + int(found[0])) // form.parts, form.parts)
        start += len(raw)
    return -1
