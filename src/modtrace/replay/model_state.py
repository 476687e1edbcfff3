"""What a model, its arguments and the process are before a run, to be put back after it."""

import copy
from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from ..collect.slots import find_slots
from .contents import aside, digest
from .generators import AllGenerators

#: What of the attributes of a module is put back with what it holds, not only as an object.
_CONTAINERS = (list, dict, set, OrderedDict)


class ModelState:
    """Parameters, buffers, gradients, attributes of modules, generators, and the content of the arguments."""

    def __init__(self, model: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        self._modules = [_ModuleState(each) for each in model.modules()]
        given = [slot.tensor for slot in find_slots([list(args), dict(kwargs)]) if slot.tensor is not None]
        tensors = {id(each): each for each in (*model.parameters(), *model.buffers(), *given)}
        self._tensors = [_TensorState(each) for each in tensors.values()]
        self._generators = AllGenerators()
        self._grad_mode = torch.is_grad_enabled()

    def put_back(self) -> None:
        """Makes all of it what it was."""
        torch.set_grad_enabled(self._grad_mode)
        for module in self._modules:
            module.put_back()
        for tensor in self._tensors:
            tensor.put_back()
        self._generators.put_back()

    def clear_gradients(self) -> None:
        """Has the next backward begin with no gradients; those of the user's come back with `put_back`."""
        for each in self._tensors:
            if each.tensor.is_leaf:
                each.tensor.grad = None

    def differences(self) -> list[str]:
        """What is not as it was."""
        found = [module.difference() for module in self._modules]
        return [each for each in found if each] + [
            f"the content of a tensor of shape {tuple(each.tensor.shape)}"
            for each in self._tensors
            if not each.is_as_it_was()
        ]


def copy_arguments(
    args: Sequence[Any], kwargs: Mapping[str, Any]
) -> tuple[Sequence[Any], Mapping[str, Any], str | None]:
    """Arguments for one run: the same tensors in containers and objects (caches) of their own.

    Tensors that hang on a graph of the user's are cut off, so that no backward runs into it.

    Returns:
        the arguments, and why they could not be copied (then they are the user's own).
    """
    given: Any = [list(args), dict(kwargs)]
    memo: dict[int, Any] = {}
    with aside():
        for slot in find_slots(given):
            if slot.tensor is not None:
                memo[id(slot.tensor)] = _cut_off(slot.tensor)
    memo.update((id(each), each) for each in _modules_in(given))
    try:
        copied_args, copied_kwargs = copy.deepcopy(given, memo)
    except Exception as error:
        return args, kwargs, f"{type(error).__name__}: {error}"
    return copied_args, copied_kwargs, None


def _cut_off(tensor: torch.Tensor) -> torch.Tensor:
    if tensor.is_leaf:
        return tensor
    return tensor.detach().requires_grad_(tensor.requires_grad)


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


class _ModuleState:
    """The attributes of one module; of lists, dicts and sets among them what they hold."""

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._attributes = dict(vars(module))
        self._held = {
            name: copy.copy(each) for name, each in self._attributes.items() if type(each) in _CONTAINERS
        }

    def put_back(self) -> None:
        own = vars(self._module)
        for name in [each for each in own if each not in self._attributes]:
            del own[name]
        own.update(self._attributes)
        for name, held in self._held.items():
            if not _same(own[name], held):
                _refill(own[name], held)

    def difference(self) -> str | None:
        """The first attribute that is another one now; None: there is none."""
        own, kind = vars(self._module), type(self._module).__name__
        changed = [
            name for name in {**own, **self._attributes} if own.get(name) is not self._attributes.get(name)
        ]
        changed += [name for name, held in self._held.items() if name in own and not _same(own[name], held)]
        return f"the attribute {changed[0]!r} of a {kind}" if changed else None


def _same(one: Any, other: Any) -> bool:
    """Whether two containers hold the same objects."""
    if len(one) != len(other):
        return False
    if isinstance(one, dict):
        return [*map(id, one)] == [*map(id, other)] and _same([*one.values()], [*other.values()])
    return (
        {*map(id, one)} == {*map(id, other)} if isinstance(one, set) else [*map(id, one)] == [*map(id, other)]
    )


def _refill(container: Any, held: Any) -> None:
    container.clear()
    container.extend(held) if isinstance(container, list) else container.update(held)


class _TensorState:
    """The content of one tensor, and its gradient."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor
        self._grad = tensor.grad if tensor.is_leaf else None
        self._requires_grad = tensor.requires_grad
        with aside():
            self._content = _try_clone(tensor)

    def is_as_it_was(self) -> bool:
        """Whether the bits are the same."""
        with aside():
            return self._content is None or _same_bits(self.tensor, self._content)

    def put_back(self) -> None:
        if self.tensor.is_leaf:
            self.tensor.grad = self._grad
            if self.tensor.requires_grad is not self._requires_grad:
                self.tensor.requires_grad_(self._requires_grad)
        if not self.is_as_it_was() and self._content is not None:
            with aside():
                self.tensor.data.copy_(self._content)  # counts no version: a graph of the user's may hold it


def _try_clone(tensor: torch.Tensor) -> torch.Tensor | None:
    try:
        return tensor.detach().clone()
    except (RuntimeError, NotImplementedError):  # a lazy parameter, or a tensor of a kind that has no copies
        return None


def _same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    if one.shape != other.shape or one.dtype != other.dtype:
        return False
    if one.layout is not torch.strided or one.is_quantized or one.is_nested:
        return True
    return digest(one) == digest(other)
