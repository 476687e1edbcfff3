"""Chooses the elements of a tensor's sample, which are the same in every step and every run."""

from typing import Any

import numpy as np
import numpy.typing as npt


def sample_positions(numel: int, k: int) -> npt.NDArray[np.int64]:
    """Returns flat row-major indices of `k` elements, ascending and distinct: one in each of `k` equal parts.

    They depend only on `numel` and `k`. If there are at most `k` elements, all are returned.
    """
    if numel <= k:
        return np.arange(numel)
    positions: npt.NDArray[np.int64] = place_in_parts(np.arange(k), numel, k)
    return positions


def place_in_parts(part: Any, numel: int, k: int) -> Any:
    """Returns the index of one element of each part; `numel` must be larger than `k`.

    It uses only operators, so that it works equally for a tensor on a device.

    Args:
        part: 64-bit integers, which wrap around if they overflow.
        numel: the number of elements.
        k: the number of parts.
    """
    size, rest = divmod(numel, k)
    start, end = (number * size + number * rest // k for number in (part, part + 1))
    return start + _scramble(part) % (end - start)


def _scramble(numbers: Any) -> Any:
    """Returns a pseudo-random integer below 2^62 for each number.

    It multiplies by odd factors and shifts, as S. Vigna's SplitMix64, whose constants it uses as signed numbers.
    """
    bits = (numbers + 1) * -0x61C8864680B583EB
    bits = (bits ^ (bits >> 30 & 0x3FFFFFFFF)) * -0x40A7B892E31B1A47
    bits = (bits ^ (bits >> 27 & 0x1FFFFFFFFF)) * -0x6B2FB644ECCEEE15
    return bits >> 2 & 0x3FFFFFFFFFFFFFFF
