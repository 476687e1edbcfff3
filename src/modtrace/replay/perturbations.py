"""Makes other contents for a tensor that an op reads: near, far, permuted or constant, as its dtype allows."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from itertools import count, islice, zip_longest
from typing import Any

import torch

from ..torch_internals.ops import number_arguments
from .contents import copy_of, tensor_in
from .kept_ops import KeptOp
from .op_families import CUTTING, PASSED_OVER, may_be_index
from .replayer import moved

#: Magnitudes of the values that replace real numbers.
_SCALES = (1.0, 100.0, 1e-3)

#: The number of times at most that all other arguments are changed at once.
_OTHER_CONTENTS = 32


def perturbed(kept: KeptOp, at: int, inputs: Sequence[torch.Tensor], seed: int) -> Iterator[torch.Tensor]:
    """Yields copies of one tensor that an op reads, with other contents; those most likely to matter come first.

    Args:
        kept: the op. The numbers among its arguments suggest contents, because the op may compare with them.
        at: the number of the tensor in `inputs`.
        inputs: all tensors among the op's arguments.
        seed: the seed of the random contents.
    """
    tensor = inputs[at]
    others = [other for place, other in enumerate(inputs) if place != at]
    generator = torch.Generator().manual_seed(seed)
    is_index = may_be_index(tensor, kept.schema.func, kept.argument_names[at])
    for change in _changes(tensor, kept, others, generator, is_index=is_index):
        storage = copy_of(tensor.untyped_storage())
        flat = _whole(tensor, storage) if kept.name.startswith("aten.as_strided") else _span(tensor, storage)
        flat.copy_(change(_widened(flat)).to(flat.dtype))
        yield moved(tensor, storage)
    if not is_index:
        yield from _as_others(tensor, others)


def with_other_arguments(
    kept: KeptOp, at: int, inputs: Sequence[torch.Tensor], seed: int
) -> Iterator[tuple[KeptOp, list[torch.Tensor]]]:
    """Yields the op and its tensors with other numbers, other tensors or both; only the tensor `at` stays."""
    others = [index for index in range(len(inputs)) if index != at]
    other_numbers = _with_other_numbers(kept)
    if other_numbers is not None:
        yield other_numbers, list(inputs)
    for op in (kept, other_numbers):
        if op is not None:
            streams = [
                islice(perturbed(op, other, inputs, seed + 1 + other), _OTHER_CONTENTS) for other in others
            ]
            for contents in zip_longest(*streams):
                tensors = list(inputs)
                for place, content in zip(others, contents, strict=True):
                    tensors[place] = inputs[place] if content is None else content
                yield op, tensors


def _with_other_numbers(kept: KeptOp) -> KeptOp | None:
    """Returns the op with other factors, exponents and limits; None if it has no such arguments."""
    names = kept.schema.argument_names
    numbers, order = number_arguments(kept.schema.func), count()

    def change(key: int | str, value: Any) -> Any:
        name = names[key] if isinstance(key, int) else key
        if name in PASSED_OVER and value == 0:
            return -1
        if name in CUTTING:
            return [0] * len(value) if isinstance(value, list) else 0
        return _other_number(value, next(order)) if name in numbers else value

    template = kept.template.changed(change)
    return None if template.key() == kept.template.key() else replace(kept, template=template)


def _other_number(value: Any, order: int) -> Any:
    """Returns another number of the same type.

    The number grows with `order`, so that a lower limit stays below an upper one.
    """
    if isinstance(value, list):
        return [_other_number(number, order) for number in value]
    if type(value) is int:
        return order + 2
    return order + 0.5 if type(value) is float else value


_Change = Callable[[torch.Tensor], torch.Tensor]


def _changes(
    tensor: torch.Tensor,
    kept: KeptOp,
    others: Sequence[torch.Tensor],
    generator: torch.Generator,
    *,
    is_index: bool,
) -> Iterator[_Change]:
    if tensor.dtype is torch.bool:
        yield from _of_truths(tensor, generator)
    elif tensor.dtype.is_floating_point or tensor.dtype.is_complex:
        yield from _of_reals(tensor, generator)
        yield from map(_constant, _compared_with(kept, others))
    elif is_index:
        yield from _of_indices(tensor, generator)
    else:
        yield from _of_integers(tensor, generator)
        limits = torch.iinfo(tensor.dtype)
        values = _compared_with(kept, others)
        yield from (_constant(value) for value in values if _least(limits) <= value <= limits.max)


def _of_truths(tensor: torch.Tensor, generator: torch.Generator) -> Iterator[_Change]:
    yield lambda flat: ~flat
    yield from map(_constant, (1, 0))
    yield from _digits(tensor, 0, 2)
    for _ in range(5):
        yield lambda flat: _random(flat, generator) > 0.5


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


def _of_integers(tensor: torch.Tensor, generator: torch.Generator) -> Iterator[_Change]:
    """Yields changes of the elements to other integers, between the minimum minus 1 and the maximum plus 1."""
    limits = torch.iinfo(tensor.dtype)
    known = _widened(tensor) if tensor.numel() else torch.zeros(1, dtype=torch.int64)
    low, high = max(int(known.min()) - 1, _least(limits)), min(int(known.max()) + 1, limits.max)
    yield lambda flat: torch.where(flat < high, flat + 1, torch.full_like(flat, low))
    yield from map(_constant, dict.fromkeys((high, low, 0)))
    yield from _digits(tensor, low, high - low + 1)
    for _ in range(3):
        yield lambda flat: (low + _random(flat, generator) * (high - low + 1)).floor().clamp(low, high)
    yield lambda flat: flat.flip(0)


def _digits(tensor: torch.Tensor, low: int, base: int) -> Iterator[_Change]:
    """Yields the digits of the places of elements, from `low` on. Any two places differ in a digit."""
    place = 1
    while place < _length(tensor):
        yield lambda flat, place=place: low + torch.arange(len(flat), device=flat.device) // place % base  # type: ignore[misc]
        place *= base


def _of_indices(tensor: torch.Tensor, generator: torch.Generator) -> Iterator[_Change]:
    """Yields changes of the elements to integers that occur in the tensor, or to 0.

    Other indices may be out of bounds, even those between 0 and a mark such as -100.
    """
    shown = _widened(tensor).reshape(-1)
    known = torch.unique(torch.cat([shown, shown.new_zeros(1)]))

    def at(places: torch.Tensor) -> torch.Tensor:
        some: torch.Tensor = known[places % len(known)]
        return some

    yield lambda flat: at(torch.searchsorted(known, flat) + 1)
    yield from map(_constant, dict.fromkeys((int(known[-1]), int(known[0]), 0)))
    for _ in range(3):
        yield lambda flat: at((_random(flat, generator) * len(known)).long())
    yield lambda flat: at(torch.searchsorted(known, flat.flip(0)))


def _least(limits: torch.iinfo) -> int:
    """Returns the smallest integer to try.

    It is above the smallest integer of the dtype, whose division by -1 ends the process (torch 2.13).
    """
    return max(limits.min, -limits.max)


def _compared_with(kept: KeptOp, others: Sequence[torch.Tensor]) -> Iterator[float]:
    """Yields the numbers with which an op may compare its elements, each followed by its two neighbours."""
    numbers = [*kept.template.scalars(), *(number for other in others for number in _extremes(other))]
    steps = (number + step for number in numbers for step in (0, 1, -1) if number == number)
    yield from dict.fromkeys(steps)


def _extremes(tensor: torch.Tensor) -> tuple[float, ...]:
    """Returns the smallest and the largest finite element, and the first one."""
    if not tensor.numel() or tensor.dtype.is_complex:
        return ()
    wide = tensor.double()
    finite = wide[wide.isfinite()]
    limits = (float(finite.min()), float(finite.max())) if finite.numel() else ()
    return (float(wide.reshape(-1)[0]), *limits)


def _as_others(tensor: torch.Tensor, others: Sequence[torch.Tensor]) -> Iterator[torch.Tensor]:
    """Yields copies of a tensor, filled with the elements of other tensors of a suitable shape."""
    for other in others:
        if tensor.dtype is other.dtype:
            filled = moved(tensor, copy_of(tensor.untyped_storage()))
            with suppress(RuntimeError):  # the shape does not match, or elements share memory
                filled.copy_(other)
                yield filled


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
    """Returns the magnitude of the largest finite element, at most 1e4; 1 if that is zero or there is none."""
    sizes = _widened(tensor).abs().double()
    sizes = sizes[sizes.isfinite()]
    largest = float(sizes.max()) if sizes.numel() else 0.0
    return min(largest, 1e4) or 1.0


def _widened(tensor: torch.Tensor) -> torch.Tensor:
    """Returns a copy in a dtype that supports all operations, which float8 and uint16 do not."""
    if tensor.dtype is torch.bool or tensor.dtype.is_complex:
        return tensor.clone()
    return tensor.to(torch.float64 if tensor.dtype.is_floating_point else torch.int64, copy=True)


def _whole(tensor: torch.Tensor, storage: torch.UntypedStorage) -> torch.Tensor:
    """Returns the whole storage as a vector. `as_strided` may read all of it, whatever the tensor itself shows."""
    return tensor_in(storage, tensor.dtype, 0, (storage.nbytes() // tensor.itemsize,), (1,))


def _span(tensor: torch.Tensor, storage: torch.UntypedStorage) -> torch.Tensor:
    """Returns the part of the storage that the tensor covers, as a vector."""
    return tensor_in(storage, tensor.dtype, int(tensor.storage_offset()), (_length(tensor),), (1,))


def _length(tensor: torch.Tensor) -> int:
    steps = zip(tensor.shape, tensor.stride(), strict=True)
    return 1 + sum((size - 1) * stride for size, stride in steps) if tensor.numel() else 0
