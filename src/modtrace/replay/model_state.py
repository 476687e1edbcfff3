"""Saves the state of a model, its arguments and the process before a run, and restores it afterwards."""

import copy
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack
from typing import Any

import torch
from torch import nn

from ..collect.structures.find import find_slots
from .contents import aside
from .generators import AllGenerators
from .module_state import ModuleState, within
from .tensor_state import TensorState


class ModelState:
    """The state of a model: parameters, buffers, gradients, module attributes, generators, content of the arguments.

    Args:
        clones_parameters: copies the content of the parameters now. If False, call `about_to_write` before
            anything writes to a tensor.
    """

    def __init__(
        self,
        model: nn.Module,
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        *,
        clones_parameters: bool = True,
    ) -> None:
        self._modules = [ModuleState(each) for each in model.modules()]
        held = [each for module in self._modules for each in module.contents()]
        given = [each for _, each in tensors_in([list(args), dict(kwargs)])]
        given += [each for each in held if is_tensor(each)]
        tensors = {id(each): each for each in (*model.parameters(), *model.buffers(), *given)}
        self._tensors = [
            TensorState(each, with_content=clones_parameters or not isinstance(each, nn.Parameter))
            for each in tensors.values()
        ]
        self._uncopied: dict[int, list[TensorState]] = {}  # by `id` of the storage
        if not clones_parameters:
            for state in self._tensors:
                self._uncopied.setdefault(_storage_key(state.tensor), []).append(state)
        self._generators = AllGenerators([*held, *within([list(args), dict(kwargs)])])
        self._grad_mode = torch.is_grad_enabled()

    def about_to_write(self, tensor: torch.Tensor) -> None:
        """Copies the tensors that share memory with `tensor`, unless they have been copied before."""
        for state in self._uncopied.pop(_storage_key(tensor), ()):
            state.keep()

    def put_back(self) -> None:
        """Restores everything. If one part fails or an interrupt comes, the other parts are restored nevertheless."""
        with ExitStack() as stack:
            stack.callback(self._generators.put_back)
            for tensor in self._tensors:
                stack.callback(tensor.put_back)
            for module in self._modules:
                stack.callback(module.put_back)
            torch.set_grad_enabled(self._grad_mode)

    def clear_gradients(self) -> None:
        """Clears all gradients, so that the next backward starts without any; `put_back` restores the user's."""
        for each in self._tensors:
            if each.tensor.is_leaf:
                each.tensor.grad = None

    def differences(self) -> list[str]:
        """Returns descriptions of what has changed since the state was saved."""
        found = [module.difference() for module in self._modules]
        return [each for each in found if each] + [
            f"the content of a tensor of shape {tuple(each.tensor.shape)}"
            for each in self._tensors
            if not each.is_as_it_was()
        ]


def copy_arguments(
    args: Sequence[Any], kwargs: Mapping[str, Any]
) -> tuple[Sequence[Any], Mapping[str, Any], str | None]:
    """Copies the arguments for one run: the tensors stay the same, containers and objects such as caches are copied.

    Tensors with an autograd graph are detached, so that no backward runs into the user's graph.

    Returns:
        the positional and the keyword arguments, and the reason why they could not be copied (None if they
        were; otherwise they are the user's own).
    """
    given: Any = [list(args), dict(kwargs)]
    memo: dict[int, Any] = {}
    with aside():
        for _, each in tensors_in(given):
            memo[id(each)] = each if each.is_leaf else each.detach().requires_grad_(each.requires_grad)
    memo.update((id(each), each) for each in _modules_in(given))
    try:
        copied_args, copied_kwargs = copy.deepcopy(given, memo)
    except Exception as error:
        return args, kwargs, f"{type(error).__name__}: {error}"
    return copied_args, copied_kwargs, None


def _modules_in(values: Iterable[Any]) -> list[nn.Module]:
    found: list[nn.Module] = []
    for each in values:
        if isinstance(each, nn.Module):
            found.append(each)
        elif isinstance(each, (list, tuple)):
            found += _modules_in(each)
        elif isinstance(each, dict):
            found += _modules_in(each.values())
    return found


def is_tensor(value: Any) -> bool:
    """Returns whether a value is a tensor. Only its type is read, because proxies may claim to be of another class."""
    return issubclass(type(value), torch.Tensor)


def tensors_in(value: Any) -> list[tuple[str, torch.Tensor]]:
    """Returns the tensors in a value, each with its slot."""
    return [(each.slot, each.tensor) for each in find_slots(value) if each.tensor is not None]


def _storage_key(tensor: torch.Tensor) -> int:
    with aside():
        try:
            return id(tensor.untyped_storage())
        except RuntimeError:  # the tensor has no storage
            return id(tensor)
