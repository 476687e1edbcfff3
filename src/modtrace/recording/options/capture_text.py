"""Reads a capture from a text, as the command line takes it: `roles=output stats=2 hash steps=::10`."""

import shlex
from typing import Any

from ..suggestions import did_you_mean
from .capture import STATS, Capture

#: The names that may occur in the text, and the function that reads the value of each.
_FLAGS = ("hash", "sketch", "micro_batches", "tensors")
_NUMBERS = ("stats", "sample", "on_trigger", "channel_dim")
_LISTS = ("roles", "types", "ops", "include", "exclude")
_TEXTS = ("steps", "tensors")
_NAMES = tuple(dict.fromkeys((*_LISTS, "steps", *_NUMBERS, *_FLAGS)))


def parse_capture(text: str) -> "Capture | str":
    """Returns the capture that a text describes, or `"stats"` for that word.

    Words are separated by spaces. They are `name=value`, where the items of lists are separated by commas, or the bare
    names of flags. Values that contain spaces or commas can be quoted, and `include` may occur several times.

    Raises:
        ValueError: a word cannot be read, or the capture makes no sense.
    """
    if text.strip() == STATS:
        return STATS
    if not text.strip():
        raise ValueError(
            f"capture={text!r} says nothing: give words such as 'roles=output stats=2', or 'stats'"
        )
    try:
        return Capture(**_read_options(text))
    except (TypeError, ValueError) as error:
        raise ValueError(f"capture={text!r} cannot be read: {error}") from error


def _read_options(text: str) -> dict[str, Any]:
    options: dict[str, Any] = {}
    for word in _split(text):
        name, value = _read(word)
        options[name] = [*options[name], *value] if name in options and name in _LISTS else value
    if options.get("roles") == ["all"]:
        options["roles"] = "all"
    return options


def _split(text: str) -> list[str]:
    try:
        return shlex.split(text)
    except ValueError as error:
        raise ValueError(f"it cannot be parted into words: {error}") from error


def _read(word: str) -> tuple[str, Any]:
    name, has_value, value = word.partition("=")
    if name not in _NAMES:
        hint = did_you_mean(name, _NAMES)
        raise ValueError(f"a capture has no {name!r}.{hint} There are: {', '.join(_NAMES)}")
    if not has_value:
        if name in _FLAGS:
            return name, True
        raise ValueError(f"{name!r} needs a value, as in {name}=...")
    if name in _NUMBERS:
        return name, _number(name, value)
    if name in _LISTS:
        return name, [value] if value.startswith("re:") else value.split(",")
    if name in _TEXTS:
        return name, value
    raise ValueError(f"{name!r} takes no value, because its name alone turns it on")


def _number(name: str, value: str) -> int:
    try:
        return int(value)
    except ValueError:
        raise ValueError(f"{name}={value} is no number") from None
