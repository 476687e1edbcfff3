"""Tells in what the arguments of two runs of an op differ, but for tensors."""

import json
from typing import Any

#: They say where and how a tensor lies, and not what it holds.
_NOT_TOLD = frozenset({"device", "layout", "pin_memory", "memory_format", "non_blocking"})

_TENSOR, _DEFAULT = "a tensor", "by default"


def compare_arguments(args: str | None, args_b: str | None) -> tuple[str, ...]:
    """Returns which arguments differ: `eps 1e-05 against 0.001`.

    Args:
        args: the template of the arguments of one op, a value of the column `args` of the table `ops`.
        args_b: that of the other.
    """
    if args == args_b:
        return ()
    given, given_b = _read(args), _read(args_b)
    return tuple(
        f"{name} {_text(given, name)} against {_text(given_b, name)}"
        for name in {**given, **given_b}
        if name not in _NOT_TOLD and given.get(name, _DEFAULT) != given_b.get(name, _DEFAULT)
    )


def _read(args: str | None) -> dict[str, Any]:
    """Returns the arguments of an op by name; those of tensors as _TENSOR, defaults are not there."""
    given = json.loads(args or "{}")
    return {name: _TENSOR if "$" in json.dumps(value) else value for name, value in given.items()}


def _text(given: dict[str, Any], name: str) -> str:
    value = given.get(name, _DEFAULT)
    return value if isinstance(value, str) else json.dumps(value)
