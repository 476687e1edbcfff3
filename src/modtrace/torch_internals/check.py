"""Tells whether a private name of torch is where modtrace looks for it."""

import importlib
from collections.abc import Iterator
from types import CodeType
from typing import Any, NamedTuple


class Check(NamedTuple):
    """One private name of torch, and what is lost without it."""

    holder: str  # a module, class or function of torch, with its whole path
    attribute: str  # an attribute of the holder; of a function also a name that its code uses
    what_is_lost: str

    @property
    def name(self) -> str:
        """The whole name, as `modtrace doctor` prints it."""
        return f"{self.holder}.{self.attribute}"

    @property
    def is_found(self) -> bool:
        """Whether the installed torch has the name."""
        holder = _resolve(self.holder)
        return hasattr(holder, self.attribute) or self.attribute in _names_in(holder)


def _resolve(path: str) -> Any:
    """Returns what a dotted path leads to, importing modules on the way; None if it leads nowhere."""
    found: Any = None
    parts = path.split(".")
    for count, part in enumerate(parts, 1):
        inner = getattr(found, part, None)
        found = _import(".".join(parts[:count])) if inner is None else inner
    return found


def _import(path: str) -> Any:
    try:
        return importlib.import_module(path)
    except Exception:  # what raises while it is imported cannot be used either
        return None


def _names_in(holder: Any) -> Iterator[str]:
    """Yields what instances of a class have by its annotations, and what the code of a function names."""
    for kind in getattr(holder, "__mro__", ()):
        yield from vars(kind).get("__annotations__", ())
    code = getattr(holder, "__code__", None)
    pending = [] if code is None else [code]
    while pending:
        code = pending.pop()
        yield from (*code.co_names, *code.co_varnames, *code.co_cellvars, *code.co_freevars, code.co_name)
        for each in code.co_consts:
            if isinstance(each, str):
                yield each
            elif isinstance(each, CodeType):
                pending.append(each)
