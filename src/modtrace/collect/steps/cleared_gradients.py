"""Detects that the gradients a backward left have been cleared, which begins a new step without an optimizer."""

import weakref
from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from ...measure.dtypes import format_of
from ...measure.memory import array_over, extent_of
from ...torch_internals.gradients import read_gradients
from ...torch_internals.modes import DisableTorchFunction
from ...torch_internals.tensors import version_of
from ..names.walk import descendants, parameter_of

#: The largest gradient, in elements, that is read to see whether it was zeroed (`set_to_none=False`).
MAX_ELEMENTS = 65_536


class GradientEvidence:
    """A parameter that had a gradient when a backward ended.

    It refers to the parameter through its module, as a weak reference makes `torch.utils.swap_tensors` fail.
    """

    __slots__ = ("_grad_id", "_module", "_name", "_version")

    def __init__(self, module: nn.Module, name: str, grad: torch.Tensor) -> None:
        self._module = weakref.ref(module)
        self._name = name
        self._grad_id = id(grad)
        self._version = version_of(grad)

    def is_cleared(self) -> bool:
        """Returns whether the gradient is None, or was written to and is zero now."""
        module = self._module()
        parameter = None if module is None else parameter_of(module, self._name)
        if parameter is None:
            return True
        with DisableTorchFunction():
            read = read_gradients([parameter])
            if read is None:
                return False  # it may be, and is looked at again when the next backward begins
            [grad] = read
            if grad is None:
                return True
            if id(grad) != self._grad_id or version_of(grad) == self._version:
                return False
            return is_zero(grad)


def is_zero(grad: torch.Tensor) -> bool:
    """Returns whether a gradient is seen to be zero. One on a device, or one that is large, is not read."""
    if type(grad) is not torch.Tensor:
        return False  # a fake tensor cannot be read, a distributed one would communicate
    if grad.device.type != "cpu" or grad.layout != torch.strided or grad.numel() > MAX_ELEMENTS:
        return False  # reading would wait for the device, or take too long
    form, extent = format_of(grad.dtype), extent_of(grad)
    return form is not None and extent is not None and not array_over(extent, form).any()


def evidence_of(roots: Iterable["weakref.ref[Any] | None"]) -> list[GradientEvidence] | None:
    """Returns, for each root, its first parameter that has a gradient; None if gradients cannot be read now.

    Roots without a gradient are left out.
    """
    found = []
    with DisableTorchFunction():
        for root in {id(root): root for root in roots}.values():  # by `id`, as a dead reference has no hash
            module = root() if root is not None else None
            evidence = None if module is None else _evidence_below(module)
            if evidence is not None:
                found.append(evidence)
        return found if read_gradients(()) is not None else None


def _evidence_below(root: nn.Module) -> GradientEvidence | None:
    for module in (root, *descendants(root)):  # `modules()` fails if a module has no hash
        parameters = dict(module._parameters.items())
        for name, grad in zip(parameters, read_gradients(parameters.values()) or (), strict=False):
            if grad is not None and not grad.is_inference():
                return GradientEvidence(module, name, grad)
    return None
