"""Reads and restores the states of a process's random generators."""

import random
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from .contents import aside


class GeneratorStates:
    """The states of torch's default generators at some moment."""

    def __init__(self) -> None:
        """Reads the present states."""
        with aside():
            self._cuda = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else []  # type: ignore[no-untyped-call]
            self._cpu = torch.get_rng_state()

    def restore(self) -> None:
        """Sets the generators to these states."""
        with aside():
            torch.set_rng_state(self._cpu)
            if self._cuda:
                torch.cuda.set_rng_state_all(self._cuda)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, GeneratorStates) or len(self._cuda) != len(other._cuda):
            return False
        pairs = zip([self._cpu, *self._cuda], [other._cpu, *other._cuda], strict=True)
        return all(torch.equal(one, another) for one, another in pairs)

    __hash__ = None  # type: ignore[assignment]  # states are compared, not looked up


class AllGenerators:
    """The states of torch's default generators, of Python's and, if numpy is imported, of numpy's.

    Args:
        held: objects; the states of those that are a `torch.Generator` are included.
    """

    def __init__(self, held: Iterable[Any] = ()) -> None:
        self.torch = GeneratorStates()
        self.python = random.getstate()
        numpy: Any = sys.modules.get("numpy")
        self._numpy = numpy.random.get_state() if numpy else None
        with aside():
            self._held = [(item, item.get_state()) for item in held if type(item) is torch.Generator]

    def restore(self) -> None:
        """Sets all of the generators to these states."""
        self.torch.restore()
        random.setstate(self.python)
        numpy: Any = sys.modules.get("numpy")
        if numpy and self._numpy is not None:
            numpy.random.set_state(self._numpy)
        with aside():
            for generator, state in self._held:
                generator.set_state(state)

    def differing(self, other: "AllGenerators") -> list[str]:
        """Returns the names of the generators whose states differ."""
        names = [] if self.torch == other.torch else ["torch"]
        names += [] if self.python == other.python else ["random"]
        return names + ([] if repr(self._numpy) == repr(other._numpy) else ["numpy.random"])


@contextmanager
def generators_kept() -> Iterator[None]:
    """Restores the states of all generators when the block ends."""
    before = AllGenerators()
    try:
        yield
    finally:
        before.restore()
