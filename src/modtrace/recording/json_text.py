"""Parses JSON that another program may have written. Every fault in it is reported as a `ValueError`."""

import json
from collections.abc import Collection
from typing import Any

#: Python's stack has 1,000 frames, and code that walks through a value or writes it again uses two a level.
_MOST_LEVELS = 200


def parse_json(text: bytes | str) -> Any:
    """Returns the value of a JSON text. Lone surrogates, which cannot be encoded, become question marks.

    Numbers are read as by Python's `json`, including NaN and long integers; the caller checks those it uses.

    Raises:
        ValueError: the text is not JSON, it is nested more than 200 levels deep, or a name occurs twice in an object.
    """
    decoded = text if isinstance(text, str) else text.decode("utf-8")
    try:
        value = json.loads(decoded, object_pairs_hook=_to_object)
    except RecursionError:
        raise _too_deep() from None
    _check_levels(value)
    return _without_surrogates(value) if "\\u" in decoded else value


def _to_object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for at, name in enumerate(names) if name in names[:at])
        raise ValueError(f"the name {twice!r} occurs twice in an object")
    return found


def _check_levels(value: Any) -> None:
    level = [value]
    for _ in range(_MOST_LEVELS + 1):
        level = [inner for each in level for inner in _inside(each)]
        if not level:
            return
    raise _too_deep()


def _inside(value: Any) -> Collection[Any]:
    if isinstance(value, dict):
        return value.values()
    return value if isinstance(value, list) else ()


def _too_deep() -> ValueError:
    return ValueError(f"it is nested more than {_MOST_LEVELS} levels deep")


def _without_surrogates(value: Any) -> Any:
    if isinstance(value, str):
        return value.encode("utf-8", "replace").decode("utf-8")
    if isinstance(value, list):
        return [_without_surrogates(each) for each in value]
    if isinstance(value, dict):
        return {_without_surrogates(name): _without_surrogates(each) for name, each in value.items()}
    return value
