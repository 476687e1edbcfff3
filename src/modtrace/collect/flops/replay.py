"""Counts a composite operator by running it once more, on tensors that have only a shape.

In inference mode a dispatch mode sees composite operators whole; otherwise it sees their parts. The operators here are
run again because no formula gives their cost from the shapes of their arguments.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from ...torch_internals.modes import UnwrappedMode, unseen
from ...torch_internals.transforms import outside_transforms

#: Composite operators whose number of products depends on their arguments.
REPLAYED = frozenset(
    {
        "aten::cdist",
        "aten::chain_matmul",
        "aten::corrcoef",
        "aten::cov",
        "aten::einsum",
        "aten::linalg_matrix_norm",
        "aten::linalg_matrix_power",
        "aten::linalg_multi_dot",
        "aten::linalg_norm",
        "aten::linalg_vecdot",
        "aten::matrix_power",
        "aten::tensordot",
    }
)

Count = Callable[[Any, Sequence[Any], Mapping[str, Any], Any], int | None]


def replay(count: Count, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> int | None:
    """Returns the sum of `count` over the parts of a composite operator; None if it is unknown for one part.

    It uses no memory, draws no random number, and is seen by no mode but ours. An einsum takes about 0.5 ms.
    """
    adder = _Adder(count)
    with unseen(), outside_transforms(), torch.inference_mode(False), torch.no_grad(), adder:
        result = func.decompose(*_on_meta(args), **_on_meta(kwargs))
    return None if result is NotImplemented else adder.total


class _Adder(UnwrappedMode):
    """Sums the counts of the operators that run in it."""

    def __init__(self, count: Count) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # the same
        self._count = count
        self.total: int | None = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        outputs = func(*args, **kwargs)
        flops = self._count(func, _shapes(args), _shapes(kwargs), _shapes(outputs))
        self.total = None if self.total is None or flops is None else self.total + flops
        return outputs


def _on_meta(value: Any) -> Any:
    if isinstance(value, torch.Size):
        return torch.empty(value, device="meta")
    return in_each(_on_meta, value)


def _shapes(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.shape
    return in_each(_shapes, value)


def in_each(change: Callable[[Any], Any], value: Any) -> Any:
    """Returns a list or dictionary with each item changed, and anything else as it is."""
    if isinstance(value, list | tuple):
        return [change(item) for item in value]
    if isinstance(value, Mapping):
        return {key: change(item) for key, item in value.items()}
    return value
