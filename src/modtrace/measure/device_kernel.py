"""Computes the statistics of a tensor on a device without waiting for it.

Decisions that depend on the data are made on the device.
"""

import torch

#: Elements per chunk; intermediate results take at most a few times this many bytes.
_CHUNK = 2**24


def measure_on_device(tensor: torch.Tensor, row: torch.Tensor) -> None:
    """Writes the statistics of a strided tensor into a row on the same device.

    The index of the first non-finite number is -1 if the elements are in another order than row-major.

    Sums are accumulated in float64. It is some thirty launches a chunk: CUDA has kernels of its own. Call it without
    modes, gradients or transforms.

    Args:
        tensor: any floating, complex, integer or boolean dtype that the device can convert.
        row: `[8]`, float64: count, min, max, sum, sum of squares, NaN and infinite elements, index of the first of
            those.
    """
    flat, repeats = _numbers(tensor)
    if not flat.numel():
        row.zero_()
        row[1:3].fill_(torch.nan)
        return
    parts = torch.stack([_measure(chunk, at * _CHUNK) for at, chunk in enumerate(torch.split(flat, _CHUNK))])
    row[0].fill_(flat.numel())
    torch.amin(parts[:, 0], dim=0, out=row[1])
    torch.amax(parts[:, 1], dim=0, out=row[2])
    torch.sum(parts[:, 2:6], dim=0, out=row[3:7])
    if repeats != 1:
        row[0].mul_(repeats)
        row[3:7].mul_(repeats)
    if tensor.is_contiguous():
        torch.amin(parts[:, 6], dim=0, out=row[7])
        row[7].div_(2 if tensor.is_complex() else 1, rounding_mode="floor")
    else:
        row[7].fill_(-1)


def _numbers(tensor: torch.Tensor) -> tuple[torch.Tensor, int]:
    """Returns the numbers of the tensor as a vector, in the order of memory, and how often each of them counts.

    The vector has each element of an expanded tensor once. It is a copy only if the elements are not dense in memory.
    """
    tensor, repeats = once_each(tensor)
    tensor = tensor.permute(sorted(range(tensor.dim()), key=tensor.stride, reverse=True))
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor)
    return tensor.reshape(-1), repeats


def once_each(tensor: torch.Tensor) -> tuple[torch.Tensor, int]:
    """Returns the tensor with size 1 in each expanded dimension, and how often each of its elements counts."""
    repeats = 1
    for dim in range(tensor.dim()):
        if tensor.stride(dim) == 0 and tensor.size(dim) > 1:
            repeats *= tensor.size(dim)
            tensor = tensor.narrow(dim, 0, 1)
    return tensor, repeats


def _measure(chunk: torch.Tensor, start: int) -> torch.Tensor:
    """Returns the statistics of a chunk; `start` is the index of its first number."""
    if not chunk.is_floating_point() or chunk.element_size() == 1:  # float8: few ops know it
        chunk = chunk.to(torch.float64 if chunk.element_size() > 2 else torch.float32)
    low, high = torch.aminmax(chunk)
    wide = chunk.to(torch.float64)
    nans, infs = wide.isnan(), wide.isinf()
    is_any = (nans | infs).view(torch.uint8)
    first = torch.where(is_any.amax() > 0, is_any.argmax() + start, torch.inf)  # argmax: of the first one
    numbers = (low, high, wide.sum(), torch.dot(wide, wide), nans.sum(), infs.sum(), first)
    return torch.stack([number.to(torch.float64) for number in numbers])
