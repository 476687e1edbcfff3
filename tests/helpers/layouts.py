"""The ways in which the elements of a tensor may lie in memory, for laws that hold for all of them."""

from collections.abc import Callable

import torch

#: A view of 3,000 elements that lie one behind the other.
LAYOUTS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "transposed": lambda x: x.view(50, 60).t(),
    "permuted": lambda x: x.view(5, 20, 30).permute(2, 0, 1),
    "long rows, sliced": lambda x: x.view(10, 300)[1:, 7:290],
    "stepped": lambda x: x[1::3],
    "stepped and transposed": lambda x: x.view(50, 60)[::3, ::2].t(),
    "odd offset and size": lambda x: x[1:-1],
    "expanded in front": lambda x: x.view(50, 60).expand(7, 50, 60),
    "expanded inside": lambda x: x[:50].view(5, 1, 10).expand(5, 9, 10),
    "expanded scalar": lambda x: x[0].expand(30, 100),
    "expanded, stepped and transposed": lambda x: x.view(50, 60)[::2, ::3].t().unsqueeze(1).expand(-1, 4, -1),
    "overlapping windows": lambda x: x.unfold(0, 10, 3),
    "overlapping, of equal strides": lambda x: x.as_strided((40, 30), (1, 1), 5),
    "dense by as_strided": lambda x: x.as_strided((3, 5, 7), (1, 21, 3), 11),
    "no elements, expanded": lambda x: x[:0].expand(9, 0),
    "0-dim": lambda x: x[17],
    "one element of odd strides": lambda x: x.as_strided((1, 1), (77, 33), 4),
    "many dimensions": lambda x: x[:2048].view([2] * 11).permute(*range(10, -1, -1))[..., 0],
    "channels last": lambda x: x.view(2, 5, 15, 20).to(memory_format=torch.channels_last),
}


def laid_out(layout: str, dtype: torch.dtype) -> torch.Tensor:
    """Numbers from -100 to 150, or any bytes of a float of 8 bits, in a layout."""
    numbers = torch.arange(3000).mul(7919).remainder(251).sub(100)
    is_float8 = dtype.is_floating_point and dtype.itemsize == 1
    return LAYOUTS[layout](numbers.to(torch.int8).view(dtype) if is_float8 else numbers.to(dtype))
