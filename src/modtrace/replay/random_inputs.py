"""Makes inputs for a model from their shapes, without drawing from the user's generators."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn


def make_inputs(model: nn.Module, input_shapes: Sequence[Any]) -> tuple[torch.Tensor, ...]:
    """Returns one tensor for each entry, on the device of the model's first parameter; the same tensors each time.

        make_inputs(model, [(2, 3, 32, 32), ((2, 16), torch.int64)])

    Args:
        model: its first parameter gives the device, and the dtype if it is a floating-point one.
        input_shapes: for each argument a shape or `(shape, dtype)`. Floating-point elements are drawn from a
            normal distribution; integers and bools are 0 or 1, so that they are valid indices of any embedding.

    Raises:
        TypeError: `input_shapes` is not a list or tuple.
        ValueError: an entry is something else.
    """
    if not isinstance(input_shapes, (list, tuple)) or isinstance(input_shapes, torch.Size):
        raise TypeError(f"input_shapes={input_shapes!r}: give a list with one entry for each argument")
    parameter = next(model.parameters(), None)
    device = torch.device("cpu") if parameter is None else parameter.device
    floating = parameter.dtype if parameter is not None and parameter.is_floating_point() else torch.float32
    generator = torch.Generator().manual_seed(0)
    wanted = [_read(at, entry, floating) for at, entry in enumerate(input_shapes)]
    return tuple(_make(shape, dtype, device, generator) for shape, dtype in wanted)


def _read(at: int, entry: Any, floating: torch.dtype) -> tuple[tuple[int, ...], torch.dtype]:
    shape, dtype = entry, floating
    if isinstance(entry, (tuple, list)) and len(entry) == 2 and isinstance(entry[1], torch.dtype):
        shape, dtype = entry
    is_shape = isinstance(shape, (tuple, list)) and all(
        isinstance(size, int) and not isinstance(size, bool) and size >= 0 for size in shape
    )
    if not is_shape:
        raise ValueError(f"input_shapes[{at}]={entry!r}: give a tuple of ints, or (shape, dtype)")
    return tuple(shape), dtype


def _make(
    shape: tuple[int, ...], dtype: torch.dtype, device: torch.device, generator: torch.Generator
) -> torch.Tensor:
    if device.type == "meta":
        return torch.empty(shape, dtype=dtype, device=device)
    if dtype.is_complex:
        drawn = torch.randn(shape, dtype=torch.complex64, device="cpu", generator=generator)
    elif dtype.is_floating_point:
        drawn = torch.randn(shape, dtype=torch.float32, device="cpu", generator=generator)
    else:
        drawn = torch.randint(0, 2, shape, dtype=torch.int64, device="cpu", generator=generator)
    return drawn.to(device, dtype)
