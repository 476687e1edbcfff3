"""Saves the state of a model, of its arguments and of the process before a run, and restores it afterwards."""

import copy
from collections import OrderedDict, defaultdict, deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from typing import Any

import torch
from torch import nn

from ..collect.structures.find import find_slots
from .contents import aside
from .generators import AllGenerators
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
        self._modules = [ModuleState(module) for module in model.modules()]
        held = [value for module in self._modules for value in module.contents()]
        all_tensors = [tensor for _, tensor in tensors_in([list(args), dict(kwargs)])]
        all_tensors += [value for value in held if is_tensor(value)]
        tensors = {id(tensor): tensor for tensor in (*model.parameters(), *model.buffers(), *all_tensors)}
        self._tensors = [
            TensorState(tensor, with_content=clones_parameters or not isinstance(tensor, nn.Parameter))
            for tensor in tensors.values()
        ]
        self._uncopied: dict[int, list[TensorState]] = {}  # keyed by the `id` of the storage
        if not clones_parameters:
            for state in self._tensors:
                self._uncopied.setdefault(_storage_key(state.tensor), []).append(state)
        self._generators = AllGenerators([*held, *within([list(args), dict(kwargs)])])
        self._grad_mode = torch.is_grad_enabled()

    def about_to_write(self, tensor: torch.Tensor) -> None:
        """Copies the tensors that share memory with `tensor`, unless they were copied before."""
        for state in self._uncopied.pop(_storage_key(tensor), ()):
            state.keep()

    def restore(self) -> None:
        """Restores everything. If restoring one part fails or is interrupted, the other parts are still restored."""
        with ExitStack() as stack:
            stack.callback(self._generators.restore)
            for tensor in self._tensors:
                stack.callback(tensor.restore)
            for module in self._modules:
                stack.callback(module.restore)
            torch.set_grad_enabled(self._grad_mode)

    def clear_gradients(self) -> None:
        """Clears all gradients, so that the next backward starts without any; `restore` brings back the user's."""
        for state in self._tensors:
            if state.tensor.is_leaf:
                state.tensor.grad = None

    def differences(self) -> list[str]:
        """Returns descriptions of what has changed since the state was saved."""
        changes = [module.difference() for module in self._modules]
        return [text for text in changes if text] + [
            f"the content of a tensor of shape {tuple(tensor.tensor.shape)}"
            for tensor in self._tensors
            if not tensor.is_as_it_was()
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
    arguments: Any = [list(args), dict(kwargs)]
    memo: dict[int, Any] = {}
    with aside():
        for _, tensor in tensors_in(arguments):
            memo[id(tensor)] = (
                tensor if tensor.is_leaf else tensor.detach().requires_grad_(tensor.requires_grad)
            )
    memo.update((id(module), module) for module in _modules_in(arguments))
    try:
        copied_args, copied_kwargs = copy.deepcopy(arguments, memo)
    except Exception as error:
        return args, kwargs, f"{type(error).__name__}: {error}"
    return copied_args, copied_kwargs, None


def _modules_in(values: Iterable[Any]) -> list[nn.Module]:
    modules: list[nn.Module] = []
    for value in values:
        if isinstance(value, nn.Module):
            modules.append(value)
        elif isinstance(value, (list, tuple)):
            modules += _modules_in(value)
        elif isinstance(value, dict):
            modules += _modules_in(value.values())
    return modules


def is_tensor(value: Any) -> bool:
    """Returns whether a value is a tensor. Only its type is read, because proxies may claim to be of another class."""
    return issubclass(type(value), torch.Tensor)


def tensors_in(value: Any) -> list[tuple[str, torch.Tensor]]:
    """Returns the tensors in a value, each with its slot."""
    return [(item.slot, item.tensor) for item in find_slots(value) if item.tensor is not None]


def _storage_key(tensor: torch.Tensor) -> int:
    with aside():
        try:
            return id(tensor.untyped_storage())
        except RuntimeError:  # the tensor has no storage
            return id(tensor)


#: Containers whose contents are restored as well.
_CONTAINERS = (list, dict, set, OrderedDict, defaultdict, deque)

#: Types that are searched for such containers.
_ENTERED = frozenset({*_CONTAINERS, tuple})

#: Types without other objects inside, so that a vocabulary of 50,000 words is not searched word by word.
_PLAIN = frozenset({int, float, bool, str, bytes, type(None)})


class ModuleState:
    """The attributes of one module, with the contents of the containers among them at any depth."""

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._attributes = dict(vars(module))
        self._held = [
            (name, container, copy.copy(container))
            for name, value in self._attributes.items()
            for container in within([value])
            if type(container) in _CONTAINERS
        ]

    def contents(self) -> Iterator[Any]:
        """Yields the attributes, and everything in the containers among them."""
        return within(self._attributes.values())

    def restore(self) -> None:
        """Restores the attributes and the contents of their containers."""
        own = vars(self._module)
        for name in [name for name in own if name not in self._attributes]:
            del own[name]
        own.update(self._attributes)
        for _, container, held in self._held:
            if not _same(container, held):
                container.clear()
                container.extend(held) if isinstance(container, (list, deque)) else container.update(held)

    def difference(self) -> str | None:
        """Returns a description of the first attribute that has changed; None if none has."""
        own, kind = vars(self._module), type(self._module).__name__
        changed = [
            name for name in {**own, **self._attributes} if own.get(name) is not self._attributes.get(name)
        ]
        changed += [name for name, container, held in self._held if not _same(container, held)]
        return f"the attribute {changed[0]!r} of a {kind}" if changed else None


def within(values: Iterable[Any]) -> Iterator[Any]:
    """Yields the values and everything in the containers among them, each object once."""
    pending, visited = [*values], set[int]()
    while pending:
        value = pending.pop()
        if id(value) in visited:
            continue
        visited.add(id(value))
        yield value
        if type(value) in _ENTERED:
            parts = value.values() if isinstance(value, dict) else value
            pending += (part for part in parts if type(part) not in _PLAIN)


def _same(one: Any, other: Any) -> bool:
    """Returns whether two containers hold the same objects."""
    if len(one) != len(other):
        return False
    if isinstance(one, dict):
        return [*map(id, one)] == [*map(id, other)] and _same([*one.values()], [*other.values()])
    if isinstance(one, set):
        return {*map(id, one)} == {*map(id, other)}
    return [*map(id, one)] == [*map(id, other)]
