"""Computes the statistics of a tensor on a device without waiting for it.

Decisions that depend on the data are made on the device, or by the host when it reads the row.
"""

import torch

from ..memory import once_each
from .rows import FIRST_INDEX, DeviceRows, Parts

#: Numbers per chunk; intermediate results take 32 times as many bytes.
_CHUNK = 2**23


def measure_on_device(tensor: torch.Tensor, rows: DeviceRows) -> int:
    """Writes the statistics of a strided tensor into rows on the same device, and returns the number that reads them.

    Sums are accumulated in float64. It is eight launches a chunk: CUDA has kernels of its own. Call it without modes,
    gradients or transforms.

    Args:
        tensor: any floating, complex, integer or boolean dtype that the device can convert.
        rows: those of its device.
    """
    flat, repeats = _numbers(tensor)
    taken = [rows.take()]
    try:
        for at, chunk in enumerate(torch.split(flat, _CHUNK) if flat.numel() else ()):
            if at:
                taken.append(rows.take())
            _measure(chunk, rows.row(taken[-1]))
    except BaseException:
        rows.free(taken)
        raise
    divisor = (2 if tensor.is_complex() else 1) if tensor.is_contiguous() else 0
    return rows.join(Parts(tuple(taken), flat.numel(), _CHUNK, repeats, divisor))


def _numbers(tensor: torch.Tensor) -> tuple[torch.Tensor, int]:
    """Returns the numbers of the tensor as a vector, in the order of memory, and how often each of them counts.

    The vector has each element of an expanded tensor once. It is a copy only if the elements are not dense in memory.
    """
    tensor, repeats = once_each(tensor)
    tensor = tensor.permute(sorted(range(tensor.dim()), key=tensor.stride, reverse=True))
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor)
    return tensor.reshape(-1), repeats


def _measure(chunk: torch.Tensor, row: torch.Tensor) -> None:
    """Writes what `Parts` is about into a row: one launch for each statement but the views."""
    numbers = torch.empty((4, chunk.numel()), dtype=torch.float64, device=chunk.device)
    wide, squares, nans, nonfinite = numbers.unbind()
    wide.copy_(chunk)
    torch.aminmax(wide, out=(row[1], row[2]))
    torch.mul(wide, wide, out=squares)
    torch.ne(wide, wide, out=nans)
    torch.sub(wide, wide, out=nonfinite)  # 0, or NaN
    torch.ne(nonfinite, 0, out=nonfinite)
    torch.argmax(nonfinite, out=row.view(torch.int64)[FIRST_INDEX])  # of the first one
    torch.sum(numbers, dim=1, out=row[3:FIRST_INDEX])
