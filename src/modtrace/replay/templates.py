"""The arguments of an op without its tensors, to be given other tensors later."""

import copy
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

_PLAIN = frozenset(
    (int, float, bool, str, complex, type(None), torch.dtype, torch.device, torch.layout, torch.memory_format)
)


class _Hole:
    """Stands where a tensor was."""

    __slots__ = ("index",)

    def __init__(self, index: int) -> None:
        self.index = index

    def __repr__(self) -> str:
        return "$"


class _KeptGenerator:
    """Stands where a generator was, in the state it had."""

    def __init__(self, generator: torch.Generator) -> None:
        self.device = generator.device
        self.state = generator.get_state()

    def revive(self) -> torch.Generator:
        generator = torch.Generator(self.device)
        generator.set_state(self.state)
        return generator


class Template:
    """What an op was given, but for the tensors: those are numbered in the order of the arguments."""

    def __init__(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        self.tensors: list[torch.Tensor] = []  # until `forget_tensors`
        self.obstacle: str | None = None  # why it cannot be given to an op again
        self.arguments: list[int | str] = []  # of each tensor: the position or the name of its argument
        self._args = [self._take(arg, at) for at, arg in enumerate(args)]
        self._kwargs = {name: self._take(arg, name) for name, arg in kwargs.items()}

    def forget_tensors(self) -> list[torch.Tensor]:
        """Lets the tensors go, and returns them."""
        tensors, self.tensors = self.tensors, []
        return tensors

    def fill(self, tensors: Sequence[torch.Tensor]) -> tuple[list[Any], dict[str, Any]]:
        """Arguments and keyword arguments with these tensors."""
        args = [_filled(arg, tensors) for arg in self._args]
        return args, {name: _filled(arg, tensors) for name, arg in self._kwargs.items()}

    def value(self, position: int, name: str) -> Any:
        """An argument that holds no tensor; None where it is not given."""
        given = self._args[position] if position < len(self._args) else self._kwargs.get(name)
        return given

    def scalars(self) -> list[float]:
        """The real numbers among the arguments themselves."""
        values = [*self._args, *self._kwargs.values()]
        return [float(each) for each in values if type(each) in (int, float)]

    def changed(self, change: Callable[[int | str, Any], Any]) -> "Template":
        """The same, but for what `change` makes of each argument, given its position or name and its value."""
        other = copy.copy(self)
        other._args = [change(at, value) for at, value in enumerate(self._args)]
        other._kwargs = {name: change(name, value) for name, value in self._kwargs.items()}
        return other

    def key(self) -> str:
        """Equal for ops that are given the same, but for their tensors."""
        return repr((self._args, self._kwargs))

    def _take(self, value: Any, argument: int | str) -> Any:
        if isinstance(value, torch.Tensor):
            self.tensors.append(value)
            self.arguments.append(argument)
            return _Hole(len(self.tensors) - 1)
        if isinstance(value, (list, tuple)):
            return [self._take(each, argument) for each in value]
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
        return [_filled(each, tensors) for each in value]
    return value.revive() if isinstance(value, _KeptGenerator) else value
