"""Reads the user's argument for the model, and checks names that the user gives for its modules."""

import os
from collections.abc import Mapping
from typing import Any

from torch import nn

from ...recording.options.path_filter import PathFilter, describe_unmatched, unmatched
from ...recording.suggestions import did_you_mean, first_few
from .module_names import ModuleNames
from .walk import descendants


def roots_of(model: object) -> list[tuple[str | None, nn.Module]]:
    """Returns the roots in the user's argument for the model, each with the name that the user gave it.

    Args:
        model: None, a module, a mapping from names to modules, or a list or tuple of modules.

    Raises:
        TypeError: an entry is not a `torch.nn.Module`.
    """
    if model is None:
        return []
    if isinstance(model, Mapping) and model:
        return [(str(name), _checked(module, f"model[{name!r}]")) for name, module in model.items()]
    if isinstance(model, (list, tuple)) and model:
        return [(None, _checked(module, f"model[{place}]")) for place, module in enumerate(model)]
    return [(None, _checked(model, "model"))]


def check_patterns(chosen: PathFilter, model: object) -> None:
    """Checks that every pattern matches a module or parameter in the user's model.

    A pattern with a bracket may match an unregistered module, `head.(Linear#0)`, which is seen only when it runs.

    Raises:
        ValueError: a pattern matches no module and no parameter; the message lists the nearest paths.
    """
    if chosen.is_all:
        return
    names = ModuleNames()
    for name, module in roots_of(model):
        names.add_root(module, name)
    paths = names.paths()
    found = [missing for missing in unmatched(chosen, paths) if "(" not in missing.pattern.text]
    if paths and found:
        raise ValueError(describe_unmatched(found, paths, what="module or parameter"))


def check_types(types: Any, model: object) -> None:
    """Checks that every class given by name is the class of a module in the user's model.

    Raises:
        ValueError: no module has such a class; the message lists the nearest names.
    """
    if not any(isinstance(kind, str) for kind in types):
        return
    modules = [module for _, root in roots_of(model) for module in (root, *descendants(root))]
    names = {kind.__name__ for module in modules for kind in type(module).__mro__}
    for wanted in types:
        if modules and isinstance(wanted, str) and wanted not in names:
            there = first_few(sorted({type(module).__name__ for module in modules}), 20)
            raise ValueError(
                f"types: no module is a {wanted!r}.{did_you_mean(wanted, names)} There are: {there}"
            )


def _checked(given: object, where: str) -> nn.Module:
    if isinstance(given, nn.Module):
        return given
    kind = f"the class {given.__name__} itself, not an instance" if isinstance(given, type) else repr(given)
    folder = " A folder to write to is given as to=." if isinstance(given, (str, os.PathLike)) else ""
    raise TypeError(
        f"{where} is not a torch.nn.Module but {kind[:80]}. Give a module, a dict of named modules, "
        f"or None to have the roots found.{folder}"
    )
