"""Saves the attributes of a module before a run, and restores them afterwards."""

import copy
from collections import OrderedDict, defaultdict, deque
from collections.abc import Iterable, Iterator
from typing import Any

from torch import nn

#: Containers whose contents are restored too.
_CONTAINERS = (list, dict, set, OrderedDict, defaultdict, deque)

#: Types that are searched for such containers.
_ENTERED = frozenset({*_CONTAINERS, tuple})

#: Types that hold no other objects: a vocabulary of 50,000 words is not searched word by word.
_PLAIN = frozenset({int, float, bool, str, bytes, type(None)})


class ModuleState:
    """The attributes of one module, with the contents of the containers among them at any depth."""

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._attributes = dict(vars(module))
        self._held = [
            (name, each, copy.copy(each))
            for name, value in self._attributes.items()
            for each in within([value])
            if type(each) in _CONTAINERS
        ]

    def contents(self) -> Iterator[Any]:
        """Yields the attributes, and what the containers among them hold."""
        return within(self._attributes.values())

    def put_back(self) -> None:
        """Restores the attributes and the contents of their containers."""
        own = vars(self._module)
        for name in [each for each in own if each not in self._attributes]:
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
    """Yields the values and all that the containers among them hold, each object once."""
    pending, seen = [*values], set[int]()
    while pending:
        value = pending.pop()
        if id(value) in seen:
            continue
        seen.add(id(value))
        yield value
        if type(value) in _ENTERED:
            parts = value.values() if isinstance(value, dict) else value
            pending += (each for each in parts if type(each) not in _PLAIN)


def _same(one: Any, other: Any) -> bool:
    """Returns whether two containers hold the same objects."""
    if len(one) != len(other):
        return False
    if isinstance(one, dict):
        return [*map(id, one)] == [*map(id, other)] and _same([*one.values()], [*other.values()])
    if isinstance(one, set):
        return {*map(id, one)} == {*map(id, other)}
    return [*map(id, one)] == [*map(id, other)]
