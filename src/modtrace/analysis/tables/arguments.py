"""Compares the arguments that an op was given in two runs, without comparing tensors."""

import json
from typing import Any

#: Arguments that say where and how a tensor lies in memory. They do not affect what it holds.
_NOT_TOLD = frozenset({"device", "layout", "pin_memory", "memory_format", "non_blocking"})

_TENSOR, _DEFAULT = "a tensor", "(default)"


def compare_arguments(
    args: str | None, args_b: str | None, ranks: tuple[int, int] | None = None
) -> tuple[str, ...]:
    """Returns which arguments differ: `eps 1e-05 against 0.001`.

    Args:
        args: the template of the arguments of one op, a value of the column `args` of the table `ops`.
        args_b: that of the other.
        ranks: how many axes there are to count: the same axis may be 1 and -1. An op that adds one counts it, too.
    """
    if args == args_b:
        return ()
    given, given_b = _read(args), _read(args_b)
    told = {} if ranks is None else _count_from_the_end(given, ranks[0])
    told_b = {} if ranks is None else _count_from_the_end(given_b, ranks[1])
    return tuple(
        f"{name} {_text(given, name)} against {_text(given_b, name)}"
        for name in {**given, **given_b}
        if name not in _NOT_TOLD
        and {**given, **told}.get(name, _DEFAULT) != {**given_b, **told_b}.get(name, _DEFAULT)
    )


def _count_from_the_end(given: dict[str, Any], rank: int) -> dict[str, Any]:
    """Returns the arguments that say axes, all of them as negative numbers."""
    axes = {name: value for name, value in given.items() if name.startswith("dim") and value is not None}
    return {
        name: [_from_end(element, rank) for element in value]
        if isinstance(value, list)
        else _from_end(value, rank)
        for name, value in axes.items()
    }


def _from_end(axis: Any, rank: int) -> Any:
    return axis - rank if isinstance(axis, int) and axis >= 0 else axis


def _read(args: str | None) -> dict[str, Any]:
    """Returns the arguments of an op by name; those of tensors as _TENSOR, defaults are not there."""
    given = json.loads(args or "{}")
    return {name: _TENSOR if "$" in json.dumps(value) else value for name, value in given.items()}


def _text(given: dict[str, Any], name: str) -> str:
    value = given.get(name, _DEFAULT)
    return value if isinstance(value, str) else json.dumps(value)
