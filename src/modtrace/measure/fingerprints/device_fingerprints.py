"""Computes the hash and the sketch of a tensor on a device, without waiting for it.

`recording.statistics.fingerprints` defines both. Every element computes its own weight, and every bucket gathers its
elements: some forty kernels for a million of them, not yet optimised for speed. No two sums are written to one place,
so all runs give the same bits. Call the functions without modes, gradients or transforms. The first call for a device
copies 0.6 MB of tables to it.
"""

from collections.abc import Iterator, Sequence
from functools import cache
from typing import NamedTuple

import torch

from ...recording.statistics import fingerprints as definition
from ...recording.statistics.fingerprints import BLOCKS, LANES, SKETCH_SIZE, WORDS
from .fingerprints import Shard, place_of, steps_in

#: Elements at a time, with the zeros around them; intermediate results take at most 100 times as many bytes.
_PIECE = 2**20


def hash_on_device(tensor: torch.Tensor, offset: int = 0, *, shard: Shard | None = None) -> torch.Tensor:
    """Returns the 64 bits of the hash of a strided tensor, as an int64 on its device.

    Args:
        tensor: any dtype that has elements of 1, 2, 4, 8 or 16 bytes.
        offset: the index of its first element in a larger flat tensor; a complex number is two elements.
        shard: its position in a larger tensor that is not flat; `offset` is added.
    """
    total = torch.zeros((), dtype=torch.int64, device=tensor.device)
    return sum(map(_hash_rows, _rows_of(tensor, offset, shard)), total)


def sketch_on_device(tensor: torch.Tensor, offset: int = 0, *, shard: Shard | None = None) -> torch.Tensor:
    """Returns the sketch of a strided tensor, as 64 float64 on its device. Non-finite elements count as 0.

    All sums are float64.

    Args:
        tensor: any floating, complex, integer or boolean dtype that the device can convert.
        offset: see `hash_on_device`.
        shard: see `hash_on_device`.
    """
    total = torch.zeros(SKETCH_SIZE, dtype=torch.float64, device=tensor.device)
    return sum(map(_sketch_rows, _rows_of(tensor, offset, shard)), total)


class _Rows(NamedTuple):
    """Rows of elements; each row is consecutive in the flat tensor."""

    elements: torch.Tensor  # [rows, length]
    places: torch.Tensor  # [rows]: of the first element of each


def _rows_of(tensor: torch.Tensor, offset: int, shard: Shard | None) -> Iterator[_Rows]:
    parts = torch.view_as_real(tensor) if tensor.is_complex() else tensor
    shape = tuple(parts.shape)
    steps, start = (steps_in(shape), 0) if shard is None else place_of(shape, shard)
    if parts.numel():
        length = _length_of_rows(shape, steps)
        most = max(1, _PIECE * length // (LANES * _blocks_of_row(length)))
        yield from _split(parts, steps, offset + start, most)


def _split(parts: torch.Tensor, steps: Sequence[int], first: int, most: int) -> Iterator[_Rows]:
    """Yields slices of at most `most` elements. If strides force a copy, it is of one slice at a time."""
    if parts.numel() <= most:
        yield _as_rows(parts, steps, first)
        return
    dim = next(dim for dim, size in enumerate(parts.shape) if size > 1)
    size = parts.shape[dim]
    several = max(1, most * size // parts.numel())
    for at in range(0, size, several):
        part = parts.narrow(dim, at, min(several, size - at))
        yield from _split(part, steps, first + at * steps[dim], most)


def _as_rows(parts: torch.Tensor, steps: Sequence[int], first: int) -> _Rows:
    length = _length_of_rows(parts.shape, steps)
    places = torch.full((), first, dtype=torch.int64, device=parts.device)
    inside = 1
    for size, step in reversed([*zip(parts.shape, steps, strict=True)]):
        if inside < length:
            inside *= size
            continue
        along = torch.arange(size, device=parts.device) * step
        places = along.reshape(-1, *[1] * places.dim()) + places
    return _Rows(parts.reshape(-1, length), places.reshape(-1))


def _length_of_rows(shape: Sequence[int], steps: Sequence[int]) -> int:
    length = 1
    for size, step in zip(reversed(shape), reversed(steps), strict=True):
        if size > 1 and step != length:
            break
        length *= size
    return length


def _blocks_of_row(length: int) -> int:
    """Returns how many of the sketch's blocks a row may overlap."""
    return (length + 2 * LANES - 2) // LANES


def _hash_rows(rows: _Rows) -> torch.Tensor:
    words, places = _words(rows)
    weights = _tables(rows.places.device).weights[places % WORDS]
    of_rows = _mix(definition.ROW_WEIGHT, places // WORDS) | 1
    return (words * weights * of_rows).sum()


def _words(rows: _Rows) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns what each element adds to its word, and the position of the word. An element of 8 bytes is two words."""
    size_bytes = rows.elements.element_size()
    elements = rows.elements.contiguous()
    # Of one element any stride is contiguous.
    elements = elements.as_strided(elements.shape, (elements.shape[1], 1))
    along = torch.arange(elements.shape[1] * max(1, size_bytes // 4), device=elements.device)
    if size_bytes >= 4:
        places = rows.places[:, None] * (size_bytes // 4) + along
        return elements.view(torch.int32).to(torch.int64), places
    per_word, bits = 4 // size_bytes, 8 * size_bytes
    places = rows.places[:, None] + along
    numbers = elements.view(torch.int8 if size_bytes == 1 else torch.int16).to(torch.int64)
    at = places % per_word
    numbers = torch.where(at == per_word - 1, numbers, numbers & (1 << bits) - 1)  # the last one has the sign
    return numbers << at * bits, places // per_word


def _sketch_rows(rows: _Rows) -> torch.Tensor:
    """Gathers for each bucket of each block its element of the row, which avoids the races of a scatter."""
    tables, device = _tables(rows.places.device), rows.places.device
    buckets = torch.arange(LANES, device=device)
    along = torch.arange(_blocks_of_row(rows.elements.shape[1]), device=device)
    block = rows.places[:, None] // LANES + along  # [rows, blocks]
    chunk, of_chunk = block // BLOCKS, block % BLOCKS
    swap = tables.swaps[of_chunk] ^ _mix(definition.CHUNK_SWAP, chunk) & LANES - 1
    lane = buckets ^ swap[..., None]  # [rows, blocks, buckets]
    negative = (
        tables.signs[of_chunk][..., None] >> lane ^ _mix(definition.CHUNK_SIGNS, chunk)[..., None] >> buckets
    )
    numbers = _take(rows, (block * LANES - rows.places[:, None])[..., None] + lane)
    return torch.where((negative & 1).to(torch.bool), -numbers, numbers).sum(dim=(0, 1))


def _take(rows: _Rows, at: torch.Tensor) -> torch.Tensor:
    """Returns the finite numbers at these positions of each row; 0 for others, and outside of the row."""
    elements = rows.elements
    if elements.is_floating_point() and elements.element_size() == 1:  # float8: few ops know it
        elements = elements.to(torch.float32)
    numbers = elements.to(torch.float64)
    length = numbers.shape[1]
    gathered = numbers.gather(1, at.clamp(0, length - 1).flatten(1)).view_as(at)
    return torch.where((at >= 0) & (at < length) & gathered.isfinite(), gathered, 0.0)


class _Tables(NamedTuple):
    weights: torch.Tensor
    signs: torch.Tensor
    swaps: torch.Tensor


@cache
def _tables(device: torch.device) -> _Tables:
    arrays = (definition.word_weights(), definition.block_signs(), definition.block_swaps())
    return _Tables(*(torch.from_numpy(array.astype("int64")).to(device) for array in arrays))


def _mix(tag: int, numbers: torch.Tensor) -> torch.Tensor:
    """Computes `mix` of `recording.statistics.fingerprints` with int64, which wraps as uint64 does."""
    start, factors = definition.mix_start(tag), definition.MIX_FACTORS
    bits = numbers * _signed(factors[0]) + _signed(start)
    bits = (bits ^ _shift_right(bits, 30)) * _signed(factors[1])
    bits = (bits ^ _shift_right(bits, 27)) * _signed(factors[2])
    return bits ^ _shift_right(bits, 31)


def _shift_right(bits: torch.Tensor, by: int) -> torch.Tensor:
    """Shifts to the right without copying the sign bit."""
    return bits >> by & (1 << 64 - by) - 1


def _signed(bits: int) -> int:
    return bits - 2**64 if bits >> 63 else bits
