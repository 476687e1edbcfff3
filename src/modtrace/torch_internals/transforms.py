"""Reads tensors inside the transforms of `torch.func`: `vmap`, `grad`, `functionalize`."""

import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch

from .modes import unseen

#: Returns whether a tensor belongs to a running `torch.func` transform, and must not be touched, in 60 ns.
is_functorch_tensor: Callable[[torch.Tensor], bool] = getattr(
    torch._C._functorch, "is_functorch_wrapped_tensor", lambda tensor: False
)


def outside_transforms() -> AbstractContextManager[Any]:
    """Returns a context that keeps ops on plain tensors out of a running `torch.func` transform."""
    pyfunctorch = sys.modules.get("torch._functorch.pyfunctorch")
    clear = getattr(pyfunctorch, "temporarily_clear_interpreter_stack", None)
    peek = getattr(torch._C._functorch, "peek_interpreter_stack", None)
    return nullcontext() if clear is None or peek is None or peek() is None else clear()


@contextmanager
def plain_ops() -> Iterator[None]:
    """Hides ops in the block from every mode, transform and `torch.jit.trace`, and from autograd."""
    with unseen(), outside_transforms(), torch.no_grad():
        yield


def wrapped_by_functorch(tensor: torch.Tensor) -> torch.Tensor:
    """Returns the tensor inside the wrapper of a running `torch.func` transform."""
    inner: torch.Tensor = torch._C._functorch.get_unwrapped(tensor)
    return inner


def batched_below(tensor: torch.Tensor) -> torch.Tensor | None:
    """Returns the tensor of all examples that `vmap` shows one of; None if the wrapper belongs to another transform."""
    return wrapped_by_functorch(tensor) if torch._C._functorch.is_batchedtensor(tensor) else None


def is_batched_tensor(tensor: torch.Tensor) -> bool:
    """Returns whether `vmap` shows this tensor as one of many."""
    return is_functorch_tensor(tensor) and batched_below(tensor) is not None


def functional_below(tensor: torch.Tensor) -> torch.Tensor | None:
    """Returns the tensor that `torch.func.functionalize` has wrapped; None if it has not."""
    is_functional = getattr(torch, "_is_functional_tensor", None)
    if is_functional is None or not is_functional(tensor):
        return None
    inner: torch.Tensor = getattr(torch, "_from_functional_tensor")(tensor)  # noqa: B009 (unknown to mypy)
    return inner
