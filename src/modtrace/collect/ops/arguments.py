"""Keeps each set of arguments of ops once, as a JSON template that has a slot in place of each tensor."""

import json
from collections.abc import Iterator
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from ..tensor_ids.argument_reader import FLOAT, TENSOR, TRUTH
from .schemas import OpSchema

#: At most this many different sets of arguments are remembered (2 MB). AdamW gives its ops new numbers in each step,
#: one for each parameter in a `foreach` op; such parts of sets take 30 bytes each.
_KEPT = 4096
_MOST_PARTS = 2**18

#: Longer lists of numbers, such as the indices of a sampler, are cut.
_MOST_NUMBERS = 64


class ShownArguments(NamedTuple):
    """What rows say of a set of arguments."""

    template: str  # as JSON
    slots: bytes  # of the tensors in order, one behind the other
    lengths: npt.NDArray[np.int64]  # of the slots
    is_written: npt.NDArray[np.bool_]  # by slot, whether the op writes to the tensor


class Arguments:
    """The arguments of an op."""

    def __init__(self, schema: OpSchema, positional: int, given: tuple[Any, ...]) -> None:
        self.schema = schema
        self.positional = positional  # how many are given by position
        self.given = given  # behind those, names and values

    @cached_property
    def shown(self) -> ShownArguments:
        """What rows say of them: nothing of defaults, which torch leaves out only behind the last other argument."""
        slots: list[str] = []
        defaults = self.schema.defaults
        template = {
            name: _template(value, name, slots)
            for name, value in self.by_name()
            if name not in defaults or repr(value) != defaults[name]
        }
        encoded = [slot.encode() for slot in slots]
        written = {argument.name for argument in self.schema.written}
        return ShownArguments(
            json.dumps(template, separators=(",", ":")),
            b"".join(encoded),
            np.array([len(slot) for slot in encoded], np.int64),
            np.array([slot.partition("[")[0] in written for slot in slots], bool),
        )

    def by_name(self) -> Iterator[tuple[str, Any]]:
        """Yields each argument with its name. A tensor is TENSOR, a list is a tuple."""
        names, values = self.schema.argument_names, _unmarked(self.given)
        for at in range(self.positional):
            yield (names[at] if at < len(names) else f"[{at}]"), next(values)
        for name in values:
            yield name, next(values)


class ArgumentTexts:
    """Gives a number to each set of arguments, because the ops of all steps mostly have the same ones."""

    def __init__(self) -> None:
        self.known: list[Arguments] = []  # by number
        self.numbers: dict[tuple[Any, ...], int] = {}  # by what an `ArgumentReader` has found
        self._parts = 0

    def add(self, schema: OpSchema, key: tuple[Any, ...]) -> int:
        """Adds arguments that have no number, and returns their new number."""
        number = self.numbers[key] = len(self.known)
        self.known.append(Arguments(schema, key[1], key[2:]))
        self._parts += _count_parts(key)
        return number

    def take(self) -> list[Arguments]:
        """Returns the arguments by number. If there are too many, the numbers start again from 0."""
        known = self.known
        if len(known) > _KEPT or self._parts > _MOST_PARTS:
            self.known, self._parts = [], 0
            self.numbers.clear()  # the C code of the mode reads this very dictionary
        return known


def _count_parts(given: tuple[Any, ...]) -> int:
    return len(given) + sum(_count_parts(part) for part in given if isinstance(part, tuple))


def _unmarked(given: tuple[Any, ...]) -> Iterator[Any]:
    values = iter(given)
    for value in values:
        if value is FLOAT:
            value = next(values)
            yield float(value) if isinstance(value, str) else value
        elif value is TRUTH:
            yield next(values)
        else:
            yield tuple(_unmarked(value)) if isinstance(value, tuple) else value


def _template(value: Any, slot: str, slots: list[str]) -> Any:
    if value is TENSOR:
        slots.append(slot)
        return f"${slot}"
    if isinstance(value, tuple):
        return [*_templates(value, slot, slots)]
    if value is None or isinstance(value, (bool, int, str)):
        return value
    if isinstance(value, float):
        return value if value - value == 0.0 else str(value)  # JSON has no infinity and no NaN
    return str(value).removeprefix("torch.")


def _templates(values: tuple[Any, ...], slot: str, slots: list[str]) -> Iterator[Any]:
    are_numbers = all(isinstance(value, (int, float)) for value in values)
    shown = values[:_MOST_NUMBERS] if are_numbers else values
    for at, part in enumerate(shown):
        yield _template(part, f"{slot}[{at}]", slots)
    if len(shown) < len(values):
        yield f"... {len(values)} in all"
