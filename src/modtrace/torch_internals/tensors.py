"""Reads the properties of a tensor in torch: its node, its base, its hooks, its version and its storage."""

import functools
import weakref
from collections import OrderedDict
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import torch

from .dynamo import is_dynamo_compiling
from .modes import DisableTorchFunction, has_function_modes, unseen

#: The attributes in which a tensor keeps its hooks.
TENSOR_HOOKS = ("_backward_hooks", "_post_accumulate_grad_hooks")

# Autograd's own accessors, for subclasses that redefine these names: a user's property may raise, which must not end a
# recording. They take 50 ns more than the attribute.
_Own: Any = torch.Tensor
grad_fn_of: Callable[[torch.Tensor], Any] = _Own.grad_fn.__get__
_grad_of: Callable[[torch.Tensor], torch.Tensor | None] = _Own.grad.__get__
_retains_grad: Callable[[torch.Tensor], bool] = _Own.retains_grad.__get__
output_nr_of: Callable[[torch.Tensor], int] = _Own.output_nr.__get__
requires_grad_of: Callable[[torch.Tensor], bool] = _Own.requires_grad.__get__
is_leaf: Callable[[torch.Tensor], bool] = _Own.is_leaf.__get__
device_of: Callable[[torch.Tensor], torch.device] = _Own.device.__get__
#: Returns the tensor of which this one is a view; None if it is no view.
base_of: Callable[[torch.Tensor], torch.Tensor | None] = _Own._base.__get__

#: Returns the dispatch keys of a tensor as one number (`DispatchKeySet.raw_repr`), which shows in 0.4 us whether a
#: tensor is anything but a strided one in CPU memory. None if torch lacks it.
dispatch_keys: Callable[[Any], Any] | None = getattr(torch._C, "_dispatch_keys", None)


def grad_of(tensor: torch.Tensor) -> torch.Tensor | None:
    """Returns the gradient that a tensor has. Torch warns of reading it where no backward puts one there."""
    return _grad_of(tensor) if is_leaf(tensor) or _retains_grad(tensor) else None


def kind_of(tensor: torch.Tensor) -> int:
    """Returns the dispatch keys of the tensor as a number; -1 if torch does not provide them."""
    return -1 if dispatch_keys is None else int(dispatch_keys(tensor).raw_repr())


@functools.cache
def plain_kinds(device: str = "cpu") -> tuple[int, ...]:
    """Returns the `kind_of` of strided tensors on a type of device: ordinary ones, and those of inference mode.

    The result is empty if torch does not provide kinds.
    """
    if dispatch_keys is None:
        return ()
    with unseen():
        with torch.inference_mode(False):
            ordinary = torch.empty(0, device=device)
        with torch.inference_mode(True):
            inference = torch.empty(0, device=device)
    return kind_of(ordinary), kind_of(inference)


def is_on_device(tensor: torch.Tensor) -> bool:
    """Returns whether the elements of a tensor are on a device, neither in main memory nor missing."""
    return device_of(tensor).type not in ("cpu", "meta")


def has_own_dispatch(kind: type) -> bool:
    """Returns whether a tensor class handles ops in Python."""
    own = getattr(kind, "__torch_dispatch__", None)
    return own is not None and own is not torch.Tensor.__torch_dispatch__


def was_hooked(tensor: torch.Tensor) -> bool:
    """Returns whether a hook was ever registered on the tensor, even if it has been removed."""
    return tensor._backward_hooks is not None


def any_hooked(values: Any) -> bool:
    """Returns whether one of the values is a tensor with hooks. Containers are not searched."""
    if has_function_modes():
        with DisableTorchFunction():
            return any(isinstance(value, torch.Tensor) and value._backward_hooks for value in values)
    return any(type(value) is torch.Tensor and value._backward_hooks for value in values)


def hooks_on(tensor: torch.Tensor) -> list[Any]:
    """Returns the hooks on the tensor."""
    return list((tensor._backward_hooks or {}).values())


class GradientHook:
    """A hook on a tensor, which calls a function with itself and the tensor's gradient.

    Subclasses have the attributes `receive` (that function), `hooks_ref` and `__weakref__`.
    """

    __slots__ = ()

    __torch_unserializable__ = True  # torch.save warns of hooks without it (torch.utils.hooks, 2.13)

    receive: Callable[[Any, Any], None]
    hooks_ref: "weakref.ref[Any] | None"  # refers to the hooks of the tensor; None if it was never registered

    def hook(self, tensor: torch.Tensor) -> None:
        """Registers the hook as `Tensor.register_hook` does (2.13), in 1 us instead of 3.

        Call it inside `DisableTorchFunction()`, with a tensor that requires a gradient.
        """
        hooks: Any = tensor._backward_hooks
        if hooks is None:
            node = grad_fn_of(tensor)
            register: Any = getattr(node, "_register_hook_dict", None)
            if node is not None and register is None:
                handle: Any = tensor.register_hook(len)  # type: ignore[no-untyped-call]
                hooks = handle.hooks_dict_ref()
                handle.remove()
            else:
                hooks = tensor._backward_hooks = OrderedDict()
                if node is not None:
                    register(tensor)
        self.hooks_ref = weakref.ref(hooks)  # type: ignore[misc]  # subclasses have it
        hooks[self] = self

    def living_hooks(self) -> dict[Any, Any] | None:
        """Returns the hooks of the tensor; None if this one was never registered, or the tensor's graph is dead."""
        return None if self.hooks_ref is None else self.hooks_ref()

    def unhook(self) -> None:
        """Removes the hook, if it is registered."""
        hooks = None if self.hooks_ref is None else self.hooks_ref()
        if hooks is not None:
            hooks.pop(self, None)

    def __call__(self, gradient: Any) -> None:
        if not is_dynamo_compiling():
            self.receive(self, gradient)


def hook_first(tensor: torch.Tensor, hook: Callable[[torch.Tensor], None]) -> None:
    """Registers a hook that receives the gradient before the hooks that are registered already."""
    tensor.register_hook(hook)  # type: ignore[no-untyped-call]
    hooks = tensor._backward_hooks or {}
    for key in list(hooks)[:-1]:
        # torch iterates the plain dict below the OrderedDict, whose order `move_to_end` does not change.
        hooks[key] = hooks.pop(key)


def forget_removed_hooks(tensor: torch.Tensor) -> None:
    """Makes a tensor whose hooks were all removed equal to one that never had a hook.

    When the last hook is removed, torch (2.13) leaves an empty dict, and still treats the tensor as hooked. If
    `swap_tensors` then gave it other insides, without hooks, no hook of the user would ever be called again.
    """
    hooks = tensor._backward_hooks
    if hooks is not None and not hooks:
        tensor._backward_hooks = None


def insides_of(tensor: torch.Tensor) -> int:
    """Returns the address of the C++ part of a tensor, to which its hooks belong.

    `swap_tensors` exchanges these parts between two tensors.
    """
    return tensor._cdata


def storage_of(tensor: torch.Tensor) -> tuple[int, Any]:
    """Returns a number that is unique among living storages, and the storage.

    Raises:
        Exception: the tensor has no storage of its own (such as a sparse one, or one of functorch).
    """
    storage = tensor.untyped_storage()
    return storage._cdata, storage


def negated_view(tensor: torch.Tensor) -> torch.Tensor:
    """Returns a view of the storage whose elements read as their negatives, such as `x.conj().imag`."""
    negated: torch.Tensor = getattr(torch, "_neg_view")(tensor)  # noqa: B009 (unknown to mypy)
    return negated


def version_of(tensor: torch.Tensor) -> int | None:
    """Returns how many writes to a tensor autograd has seen; None if it does not count them (inference mode)."""
    try:
        return tensor._version
    except Exception:  # torch raises a RuntimeError, or a user's subclass raises anything
        return None


def count_write(tensor: torch.Tensor) -> None:
    """Makes autograd count a write to a tensor. In inference mode it counts none."""
    with suppress(Exception):  # torch raises a RuntimeError, or a user's subclass raises anything
        torch.autograd.graph.increment_version(tensor)


def set_version(tensor: torch.Tensor, version: int | None) -> None:
    """Sets the version of a tensor whose content has been restored, so that autograd sees no write (2.13).

    Without this, or if torch lacks `_unsafe_set_version_counter`, a graph with the tensor refuses to run backward.
    """
    set_counters: Any = getattr(torch._C._autograd, "_unsafe_set_version_counter", None)
    if set_counters is None or version is None or version_of(tensor) in (None, version):
        return
    with suppress(RuntimeError, TypeError):  # the function is private, and its arguments have changed before
        set_counters((tensor,), (version,))
