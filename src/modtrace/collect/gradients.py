"""Whether gradients that a backward left have been cleared since: the sign of a new step without an optimizer's."""

import weakref
from collections.abc import Iterable
from typing import Any

import torch

from ..torch_internals import unseen

#: Zeroed gradients (`set_to_none=False`) are recognised by looking at one this small, on the CPU only.
_MAX_ELEMENTS = 65_536


class GradientEvidence:
    """One parameter that had a gradient when a backward ended."""

    __slots__ = ("_grad_id", "_parameter", "_version")

    def __init__(self, parameter: torch.Tensor, grad: torch.Tensor) -> None:
        self._parameter = weakref.ref(parameter)
        self._grad_id = id(grad)
        self._version = grad._version

    def is_cleared(self) -> bool:
        """Whether the gradient is gone, or has been written since and is zero now."""
        parameter = self._parameter()
        if parameter is None:
            return True
        with torch._C.DisableTorchFunction():
            grad = parameter.grad
            if grad is None:
                return True
            if id(grad) != self._grad_id or grad._version == self._version:
                return False
            return _is_zero(grad)


def _is_zero(grad: torch.Tensor) -> bool:
    if type(grad) is not torch.Tensor:
        return False  # a fake one cannot be looked at, a distributed one would communicate
    with unseen():
        if grad.device.type != "cpu" or grad.layout != torch.strided or grad.numel() > _MAX_ELEMENTS:
            return False  # looking would synchronise the device, or cost too much
        return not bool(grad.any())


def evidence_of(roots: Iterable["weakref.ref[Any] | None"]) -> list[GradientEvidence]:
    """For each root the first parameter that has a gradient; roots without any have none."""
    found = []
    with torch._C.DisableTorchFunction():
        for root in {id(root): root for root in roots}.values():  # a dead reference has no hash
            module = root() if root is not None else None
            if module is not None:
                for parameter in module.parameters():
                    grad = parameter.grad
                    if grad is not None and not grad.is_inference():
                        found.append(GradientEvidence(parameter, grad))
                        break
    return found
