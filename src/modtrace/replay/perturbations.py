"""Other contents for a tensor that an op reads: near, far, permuted, constant; within what its kind allows."""

from collections.abc import Callable, Iterator, Sequence

import torch

from ..collect.op_plans import base_name
from .contents import copy_of, tensor_in
from .op_families import ANY_INTEGER
from .replayer import moved

#: Magnitudes of what replaces real numbers.
_SCALES = (1.0, 100.0, 1e-3)


def perturbed(
    tensor: torch.Tensor, name: str, scalars: Sequence[float], others: Sequence[torch.Tensor], seed: int
) -> Iterator[torch.Tensor]:
    """Tensors like this one on memory of their own, with other content, the likeliest to matter first.

    Args:
        name: of the op.
        scalars: numbers among its arguments, which content is compared with.
        others: the other tensors among them.
        seed: of the random numbers.
    """
    generator = torch.Generator().manual_seed(seed)
    for change in _changes(tensor, name, scalars, others, generator):
        storage = copy_of(tensor.untyped_storage())
        flat = _whole(tensor, storage) if name.startswith("aten.as_strided") else _span(tensor, storage)
        wide = (
            flat.double() if flat.dtype.is_floating_point else flat.clone()
        )  # there is no float8 arithmetic
        flat.copy_(change(wide).to(flat.dtype))
        yield moved(tensor, storage)


_Change = Callable[[torch.Tensor], torch.Tensor]


def _changes(
    tensor: torch.Tensor,
    name: str,
    scalars: Sequence[float],
    others: Sequence[torch.Tensor],
    generator: torch.Generator,
) -> Iterator[_Change]:
    if tensor.dtype is torch.bool:
        yield from _of_truths(generator)
    elif tensor.dtype.is_floating_point or tensor.dtype.is_complex:
        yield from _of_reals(tensor, generator)
        yield from map(_constant, _compared_with(scalars, others))
    elif base_name(name).split(".")[-1] in ANY_INTEGER:
        yield from _of_integers(tensor, generator, is_index=False)
        limits = torch.iinfo(tensor.dtype)
        values = (value for value in _compared_with(scalars, others) if limits.min <= value <= limits.max)
        yield from map(_constant, values)
    else:
        yield from _of_integers(tensor, generator, is_index=True)


def _of_truths(generator: torch.Generator) -> Iterator[_Change]:
    yield lambda flat: ~flat
    yield lambda flat: _random(flat, generator) > 0.5
    yield _constant(1)
    yield _constant(0)


def _of_reals(tensor: torch.Tensor, generator: torch.Generator) -> Iterator[_Change]:
    scale = _scale_of(tensor)
    yield lambda flat: flat + _normal(flat, generator) * scale
    for factor in _SCALES:
        yield lambda flat, size=factor * scale: _normal(flat, generator) * size  # type: ignore[misc]  # its default
    yield lambda flat: _normal(flat, generator).abs() * scale
    yield lambda flat: -_normal(flat, generator).abs() * scale
    yield lambda flat: flat.neg()
    for value in (0.0, 1.0, float("inf"), float("-inf"), float("nan")):
        yield _constant(value)


def _of_integers(tensor: torch.Tensor, generator: torch.Generator, *, is_index: bool) -> Iterator[_Change]:
    low, high = (int(tensor.min()), int(tensor.max())) if tensor.numel() else (0, 0)
    limits = torch.iinfo(tensor.dtype)
    low = min(low, 0) if is_index else max(low - 1, limits.min)
    high = max(high, 0) if is_index else min(high + 1, limits.max)
    yield lambda flat: torch.where(flat < high, flat + 1, torch.full_like(flat, low))
    for _ in range(3):
        yield lambda flat: (low + _random(flat, generator) * (high - low + 1)).floor().clamp(low, high)
    yield lambda flat: flat.flip(0)
    for value in (low, high, 0):
        yield _constant(value)


def _compared_with(scalars: Sequence[float], others: Sequence[torch.Tensor]) -> Iterator[float]:
    yield from (each for each in scalars if each == each)
    for other in others:
        if other.numel() and not other.dtype.is_complex:
            yield float(other.reshape(-1)[0])


def _constant(value: float) -> _Change:
    return lambda flat: torch.full(flat.shape, value, dtype=torch.float64, device=flat.device)


def _random(flat: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    return torch.rand(flat.shape, generator=generator, dtype=torch.float64).to(flat.device)


def _normal(flat: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    drawn = torch.randn(flat.shape, generator=generator, dtype=torch.float64)
    if flat.is_complex():
        drawn = torch.complex(drawn, torch.randn(flat.shape, generator=generator, dtype=torch.float64))
    return drawn.to(flat.device)


def _scale_of(tensor: torch.Tensor) -> float:
    """The magnitude of the largest finite element; 1 if there is none but zeros."""
    wide = tensor.double() if tensor.dtype.is_floating_point else tensor
    sizes = wide.abs().double()
    sizes = sizes[sizes.isfinite()]
    largest = float(sizes.max()) if sizes.numel() else 0.0
    return min(largest, 1e4) or 1.0


def _whole(tensor: torch.Tensor, storage: torch.UntypedStorage) -> torch.Tensor:
    """A storage as a vector: `as_strided` reads all of it, whatever the tensor shows."""
    return tensor_in(storage, tensor.dtype, 0, (storage.nbytes() // tensor.itemsize,), (1,))


def _span(tensor: torch.Tensor, storage: torch.UntypedStorage) -> torch.Tensor:
    """The part of a storage that a tensor of its shape and strides shows, as a vector."""
    steps = zip(tensor.shape, tensor.stride(), strict=True)
    length = 1 + sum((size - 1) * stride for size, stride in steps) if tensor.numel() else 0
    return tensor_in(storage, tensor.dtype, int(tensor.storage_offset()), (length,), (1,))
