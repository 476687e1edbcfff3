"""What the attributes of a module are before a run, to be put back after it."""

import copy
from collections import OrderedDict, defaultdict, deque
from collections.abc import Iterable, Iterator
from typing import Any

from torch import nn

#: What is put back with what it holds, not only as an object.
_CONTAINERS = (list, dict, set, OrderedDict, defaultdict, deque)

#: What is looked through for them.
_ENTERED = frozenset({*_CONTAINERS, tuple})

#: What holds nothing: a vocabulary of 50,000 words is not looked at word by word.
_PLAIN = frozenset({int, float, bool, str, bytes, type(None)})


class ModuleState:
    """The attributes of one module; of containers among them what they hold, however nested."""

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
        """The attributes, and what lies in the containers among them."""
        return within(self._attributes.values())

    def put_back(self) -> None:
        """Makes all of it what it was."""
        own = vars(self._module)
        for name in [each for each in own if each not in self._attributes]:
            del own[name]
        own.update(self._attributes)
        for _, container, held in self._held:
            if not _same(container, held):
                _refill(container, held)

    def difference(self) -> str | None:
        """The first attribute that is another one now; None: there is none."""
        own, kind = vars(self._module), type(self._module).__name__
        changed = [
            name for name in {**own, **self._attributes} if own.get(name) is not self._attributes.get(name)
        ]
        changed += [name for name, container, held in self._held if not _same(container, held)]
        return f"the attribute {changed[0]!r} of a {kind}" if changed else None


def within(values: Iterable[Any]) -> Iterator[Any]:
    """Some objects and all that lies in containers among them; an object that is reached twice comes once."""
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
    """Whether two containers hold the same objects."""
    if len(one) != len(other):
        return False
    if isinstance(one, dict):
        return [*map(id, one)] == [*map(id, other)] and _same([*one.values()], [*other.values()])
    if isinstance(one, set):
        return {*map(id, one)} == {*map(id, other)}
    return [*map(id, one)] == [*map(id, other)]


def _refill(container: Any, held: Any) -> None:
    container.clear()
    container.extend(held) if isinstance(container, (list, deque)) else container.update(held)
