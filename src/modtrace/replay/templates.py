"""Separates the arguments of an op from its tensors, so that other tensors can be filled in."""

import copy
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

_PLAIN = frozenset(
    (int, float, bool, str, complex, type(None), torch.dtype, torch.device, torch.layout, torch.memory_format)
)


class _Hole:
    """Marks the position of a tensor in the arguments."""

    __slots__ = ("index",)

    def __init__(self, index: int) -> None:
        self.index = index

    def __repr__(self) -> str:
        return "$"


class _KeptGenerator:
    """Marks the position of a generator in the arguments, and holds its state."""

    def __init__(self, generator: torch.Generator) -> None:
        self.device = generator.device
        self.state = generator.get_state()

    def revive(self) -> torch.Generator:
        generator = torch.Generator(self.device)
        generator.set_state(self.state)
        return generator


class Template:
    """The arguments of an op without its tensors, which are numbered in the order of the arguments."""

    def __init__(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        self.tensors: list[torch.Tensor] = []  # kept until `forget_tensors`
        self.obstacle: str | None = None  # why these arguments cannot be used again; None if they can
        self.arguments: list[int | str] = []  # for each tensor, the position or name of its argument
        self._args = [self._take(arg, at) for at, arg in enumerate(args)]
        self._kwargs = {name: self._take(arg, name) for name, arg in kwargs.items()}

    def forget_tensors(self) -> list[torch.Tensor]:
        """Returns the tensors, and drops the references to them."""
        tensors, self.tensors = self.tensors, []
        return tensors

    def fill(self, tensors: Sequence[torch.Tensor]) -> tuple[list[Any], dict[str, Any]]:
        """Returns the positional and the keyword arguments with `tensors` filled in."""
        args = [_filled(arg, tensors) for arg in self._args]
        return args, {name: _filled(arg, tensors) for name, arg in self._kwargs.items()}

    def value(self, position: int, name: str) -> Any:
        """Returns the value of an argument that holds no tensor; None if it was not given."""
        return self._args[position] if position < len(self._args) else self._kwargs.get(name)

    def scalars(self) -> list[float]:
        """Returns the real numbers among the arguments themselves."""
        values = [*self._args, *self._kwargs.values()]
        return [float(value) for value in values if type(value) in (int, float)]

    def changed(self, change: Callable[[int | str, Any], Any]) -> "Template":
        """Returns a copy with each argument replaced by `change(key, value)`; the key is its position or name."""
        other = copy.copy(self)
        other._args = [change(at, value) for at, value in enumerate(self._args)]
        other._kwargs = {name: change(name, value) for name, value in self._kwargs.items()}
        return other

    def key(self) -> str:
        """Returns a text that is equal for ops with equal arguments, ignoring the tensors."""
        return repr((self._args, self._kwargs))

    def _take(self, value: Any, argument: int | str) -> Any:
        if isinstance(value, torch.Tensor):
            self.tensors.append(value)
            self.arguments.append(argument)
            return _Hole(len(self.tensors) - 1)
        if isinstance(value, (list, tuple)):
            return [self._take(item, argument) for item in value]
        if isinstance(value, torch.Generator):
            return _KeptGenerator(value)
        if type(value) not in _PLAIN:
            self.obstacle = self.obstacle or f"one of its arguments is a {type(value).__name__}"
            return None
        return value


def _filled(value: Any, tensors: Sequence[torch.Tensor]) -> Any:
    if isinstance(value, _Hole):
        return tensors[value.index]
    if isinstance(value, list):
        return [_filled(item, tensors) for item in value]
    return value.revive() if isinstance(value, _KeptGenerator) else value
