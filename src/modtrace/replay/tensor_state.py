"""Saves the state of one tensor before a run, and restores it afterwards."""

from typing import Any

import torch

from ..measure.memory import once_each
from ..torch_internals.tensors import TENSOR_HOOKS, set_version, version_of
from .contents import aside, digest


class TensorState:
    """The content, memory, gradient, version and hooks of one tensor.

    Args:
        tensor: a tensor of any kind. Parts that cannot be copied are not restored.
        with_content: copies the content now. If False, call `keep` before anything writes to the tensor.
    """

    def __init__(self, tensor: torch.Tensor, *, with_content: bool) -> None:
        self.tensor = tensor
        self._grad = tensor.grad if tensor.is_leaf else None
        self._requires_grad = tensor.requires_grad
        self._version = version_of(tensor)
        self._hooks = {name: dict(getattr(tensor, name, None) or {}) for name in TENSOR_HOOKS}
        with aside():
            self._alias = _try_alias(tensor)
        self._content: torch.Tensor | None = None
        if with_content:
            self.keep()

    def keep(self) -> None:
        """Copies the content, unless that was done. Call it before anything writes to the tensor."""
        if self._alias is not None and self._content is None:
            with aside():
                self._content = _try_clone(self._alias)

    def is_as_it_was(self) -> bool:
        """Returns whether the tensor still shows the same memory, with the same bits."""
        with aside():
            return not self._has_moved() and self._has_its_bits()

    def restore(self) -> None:
        """Restores the tensor."""
        with aside():
            if self._alias is not None and self._has_moved():
                self.tensor.data = self._alias
            if self._content is not None and self._alias is not None and not self._has_its_bits():
                _once(self._alias).copy_(self._content)
        if self.tensor.is_leaf:
            self._restore_leaf()  # last, as torch checks a gradient against its tensor
        set_version(self.tensor, self._version)

    def _restore_leaf(self) -> None:
        self.tensor.grad = self._grad
        if self.tensor.requires_grad is not self._requires_grad:
            self.tensor.requires_grad_(self._requires_grad)
        for name, hooks in self._hooks.items():
            now: Any = getattr(self.tensor, name, None)
            if now is not None and dict(now) != hooks:
                now.clear()
                now.update(hooks)

    def _has_moved(self) -> bool:
        before = self._alias
        if before is None or before.layout is not torch.strided:
            return False
        return _geometry(self.tensor) != _geometry(before) or not _share_storage(self.tensor, before)

    def _has_its_bits(self) -> bool:
        if self._content is None or self._alias is None:
            return True
        return _same_bits(_once(self._alias), self._content)


def _geometry(tensor: torch.Tensor) -> tuple[Any, ...]:
    return tensor.shape, tensor.stride(), tensor.storage_offset(), tensor.dtype, tensor.device


def _share_storage(one: torch.Tensor, other: torch.Tensor) -> bool:
    try:
        return one.untyped_storage() is other.untyped_storage()
    except RuntimeError:  # neither tensor has a storage
        return True


def _once(tensor: torch.Tensor) -> torch.Tensor:
    """Returns an expanded tensor without repetitions, because torch refuses to write to repeated elements."""
    return tensor if tensor.layout is not torch.strided or tensor.is_nested else once_each(tensor)[0]


def _try_alias(tensor: torch.Tensor) -> torch.Tensor | None:
    try:
        return tensor.detach()
    except (RuntimeError, ValueError):  # a lazy parameter
        return None


def _try_clone(tensor: torch.Tensor) -> torch.Tensor | None:
    try:
        return _once(tensor).clone()
    except (RuntimeError, NotImplementedError):  # a kind of tensor that cannot be copied
        return None


def _same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    if one.shape != other.shape or one.dtype != other.dtype:
        return False
    if one.layout is not torch.strided or one.is_quantized or one.is_nested:
        return True
    return digest(one) == digest(other)
