"""Compares the environments of two recordings: versions, device, command, settings."""

import shlex
from collections.abc import Iterator, Mapping
from typing import Any

from ...recording.meta import ALL_RANKS, RunMeta

#: The largest number of lines that describe the environment.
_LINES = 5

#: The flag that holds the seed, which is not a setting.
_SEED = "seed"

#: The number of characters that are shown of a value, and how many of these precede the first difference.
_SHOWN, _BEFORE = 60, 20


def compare_environments(a: RunMeta, b: RunMeta, *, differ: bool) -> tuple[str, ...]:
    """Returns at most five lines on how the environments of two runs differ, as that often explains all differences.

    Seeds are listed only if tensors of the runs `differ`, because runs that set no seed have unequal ones.
    """
    lines = list(_find_differences(a, b, differ))
    if len(lines) <= _LINES:
        return tuple(lines)
    rest = [line.partition(":")[0] for line in lines[_LINES - 1 :]]
    return (*lines[: _LINES - 1], f"and {len(rest)} more: {', '.join(rest)}")


def _find_differences(a: RunMeta, b: RunMeta, differ: bool) -> Iterator[str]:
    yield from _compare_mappings(a.versions, b.versions)
    yield from _compare("device", a.device, b.device)
    yield from _compare("command", shlex.join(a.argv), shlex.join(b.argv))
    yield from _compare("git commit", (a.git_commit or "")[:12], (b.git_commit or "")[:12])
    yield from _compare("rank", _name_rank(a), _name_rank(b))
    if a.flags is not None and b.flags is not None:
        for name, flag in a.flags.items():  # a flag that only one run knows comes from another version
            if (differ or name != _SEED) and flag is not None and b.flags.get(name) is not None:
                advice = "; torch.manual_seed() gives both the same" if name == _SEED else ""
                yield from (line + advice for line in _compare(name, flag, b.flags[name]))
    yield from _compare_mappings(a.options, b.options, "recorded with ")


def _name_rank(meta: RunMeta) -> str:
    return f"{'all' if meta.rank == ALL_RANKS else meta.rank} of {meta.world_size}"


def _compare(name: str, a: Any, b: Any) -> Iterator[str]:
    if a != b:
        text, text_b = _to_text(a), _to_text(b)
        start = _find_start(text, text_b)
        yield f"{name}: {_cut(text, start)} / {_cut(text_b, start)}"


def _compare_mappings(a: Mapping[str, Any], b: Mapping[str, Any], prefix: str = "") -> Iterator[str]:
    for name in dict.fromkeys([*a, *b]):
        yield from _compare(f"{prefix}{name}", a.get(name), b.get(name))


def _to_text(value: Any) -> str:
    if isinstance(value, Mapping):
        return ", ".join(f"{name} {_to_text(part)}" for name, part in value.items())
    if isinstance(value, (list, tuple)):
        return "; ".join(map(_to_text, value))
    if isinstance(value, bool):
        return "on" if value else "off"
    return "none" if value is None or value == "" else str(value)


def _find_start(text: str, text_b: str) -> int:
    """Returns the position from which to show two texts, so that their first difference is visible."""
    if max(len(text), len(text_b)) <= _SHOWN:
        return 0
    pairs = enumerate(zip(text, text_b, strict=False))
    common = next((index for index, (one, two) in pairs if one != two), min(len(text), len(text_b)))
    return common - _BEFORE if common > _SHOWN - _BEFORE else 0


def _cut(text: str, start: int) -> str:
    """Returns the visible part of a text from `start` on."""
    shown = f"...{text[start:]}" if start else text
    return shown if len(shown) <= _SHOWN else f"{shown[: _SHOWN - 3]}..."
