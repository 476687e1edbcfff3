"""Parses JSON that another program may have written, and reports every fault as a `ValueError`."""

import json
from typing import Any

#: The largest depth of nested values. Python's stack has 1,000 frames, of which code that walks a value uses two a
#: level.
_MOST_LEVELS = 200


def parse_json(text: bytes | str) -> Any:
    """Returns the value of a JSON text. Lone surrogates, which cannot be encoded, become question marks.

    Numbers are read as by Python's `json`, including NaN and long integers, which the caller must check.

    Raises:
        ValueError: the text is not JSON, it is nested more than 200 levels deep, or a name occurs twice in an object.
    """
    decoded = text if isinstance(text, str) else text.decode("utf-8")
    try:
        value = json.loads(decoded, object_pairs_hook=_to_object)
        is_too_deep = _count_levels(value) > _MOST_LEVELS
    except RecursionError:
        is_too_deep = True
    if is_too_deep:
        raise ValueError(f"it is nested more than {_MOST_LEVELS} levels deep")
    return _without_surrogates(value) if "\\u" in decoded else value


def _to_object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    values = dict(pairs)
    if len(values) < len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for at, name in enumerate(names) if name in names[:at])
        raise ValueError(f"the name {twice!r} occurs twice in an object")
    return values


def _count_levels(value: Any) -> int:
    """Returns the depth of nested lists and objects, counted up to the first that is too deep."""
    level, depth = [value], 0
    while depth <= _MOST_LEVELS:
        containers = [value for value in level if isinstance(value, (dict, list))]
        level = [
            inner
            for container in containers
            for inner in (container.values() if isinstance(container, dict) else container)
        ]
        if not level:
            break
        depth += 1
    return depth


def _without_surrogates(value: Any) -> Any:
    if isinstance(value, str):
        return value.encode("utf-8", "replace").decode("utf-8")
    if isinstance(value, list):
        return [_without_surrogates(item) for item in value]
    if isinstance(value, dict):
        return {_without_surrogates(name): _without_surrogates(item) for name, item in value.items()}
    return value
