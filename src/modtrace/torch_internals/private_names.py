"""The checks of all private names of torch, which `modtrace doctor` runs."""

import pkgutil
from collections.abc import Iterator, Mapping
from importlib import import_module
from pathlib import Path
from types import CodeType
from typing import Any

#: All other files of this folder. Each says what is lost without the names that it uses.
_FILES = [
    import_module(f".{each.name}", __package__)
    for each in pkgutil.iter_modules([str(Path(__file__).parent)])
    if each.name != "private_names"
]

#: What is lost without each name: of a module, a class or a function of torch, an attribute, or a name that the code of
#: the function uses. Checked on torch 2.13.0 and 2.14.1 (CPU), where all are found.
PRIVATE_NAMES: Mapping[str, str] = {
    name: lost for file in _FILES for name, lost in file.PRIVATE_NAMES.items()
}


def check_all() -> list[tuple[str, bool, str]]:
    """Returns for every private name: its full name, whether it is there, and what is lost without it."""
    return [(name, is_found(name), lost) for name, lost in PRIVATE_NAMES.items()]


def is_found(name: str) -> bool:
    """Returns whether the installed torch has a name, if only in the function that has the code of its holder.

    torch 2.14 has moved the code of `_checkpoint_without_reentrant_generator` into a function named `..._impl`.
    """
    path, _, attribute = name.rpartition(".")
    holders = (_resolve(path), _resolve("_".join((path, "impl"))))
    return any(hasattr(each, attribute) or attribute in _names_in(each) for each in holders)


def _resolve(path: str) -> Any:
    """Returns what a dotted path leads to, importing modules on the way; None if it leads nowhere."""
    try:
        return pkgutil.resolve_name(path)
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
