"""Kernels of devices on tensors without a device: that they wait for none, and mix none."""

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

_WAITING = [
    "item",
    "tolist",
    "__bool__",
    "__int__",
    "__float__",
    "__index__",
    "cpu",
    "numpy",
    "nonzero",
    "to_list",
]


@contextmanager
def no_waiting() -> Iterator[None]:
    """Whatever would wait for the device raises."""

    def waits(self, *args, **kwargs):
        raise AssertionError("this waits for the device")

    with pytest.MonkeyPatch.context() as patch:
        for name in _WAITING:
            patch.setattr(torch.Tensor, name, waits, raising=False)
        yield


class Devices(TorchDispatchMode):
    """The devices of all tensors that take part."""

    def __init__(self) -> None:
        super().__init__()
        self.types: set[str] = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        tensors = [each for each in tree_leaves((args, kwargs, result)) if isinstance(each, torch.Tensor)]
        self.types.update(each.device.type for each in tensors)
        return result
