"""Tells how the environments of two recordings differ."""

import shlex
from collections.abc import Collection, Iterator, Mapping
from typing import Any

from ...recording.meta import RunMeta

#: At most so many differences are told one by one.
_TOLD = 5

#: The flag that is no setting: where the random numbers of a run begin.
SEED = "seed"

#: The number of characters that are shown of a value, and of those in front of the first difference.
_SHOWN, _BEFORE = 60, 20


def compare_environments(a: RunMeta, b: RunMeta, *, differ: bool) -> tuple[str, ...]:
    """Returns at most five lines on what differs between two runs: often that explains all the rest.

    Args:
        a: one run.
        b: the other.
        differ: something in them differs. Else it does not matter that they have unequal seeds, as all runs have that
            set none.
    """
    lines = list(_differences(a, b, differ))
    if len(lines) <= _TOLD:
        return tuple(lines)
    rest = [line.partition(":")[0] for line in lines[_TOLD - 1 :]]
    return (*lines[: _TOLD - 1], f"and {len(rest)} more: {', '.join(rest)}")


def _differences(a: RunMeta, b: RunMeta, differ: bool) -> Iterator[str]:
    yield from _compare_mappings(a.versions, b.versions)
    yield from _compare("device", a.device, b.device)
    yield from _compare("command", shlex.join(a.argv), shlex.join(b.argv))
    yield from _compare("git commit", (a.git_commit or "")[:12], (b.git_commit or "")[:12])
    yield from _compare("rank", f"{a.rank} of {a.world_size}", f"{b.rank} of {b.world_size}")
    if a.flags is not None and b.flags is not None:
        yield from _compare_flags(a.flags, b.flags, () if differ else (SEED,))
    yield from _compare_mappings(a.options, b.options, "recorded with ")


def _compare_flags(a: Mapping[str, Any], b: Mapping[str, Any], unasked: Collection[str]) -> Iterator[str]:
    """Yields what is set otherwise. A flag that one of the runs does not know is left out."""
    for name in a:
        if name not in unasked and a[name] is not None and b.get(name) is not None:
            advice = "; torch.manual_seed() gives both the same" if name == SEED else ""
            yield from (line + advice for line in _compare(name, a[name], b[name]))


def _compare(name: str, a: Any, b: Any) -> Iterator[str]:
    if a != b:
        one, other = (_to_text(each) for each in (a, b))
        start = _find_shown(one, other)
        yield f"{name}: {_cut(one, start)} / {_cut(other, start)}"


def _compare_mappings(a: Mapping[str, Any], b: Mapping[str, Any], prefix: str = "") -> Iterator[str]:
    for name in dict.fromkeys([*a, *b]):
        yield from _compare(f"{prefix}{name}", a.get(name), b.get(name))


def _to_text(value: Any) -> str:
    if isinstance(value, Mapping):
        return ", ".join(f"{name} {_to_text(each)}" for name, each in value.items())
    if isinstance(value, (list, tuple)):
        return "; ".join(map(_to_text, value))
    if isinstance(value, bool):
        return "on" if value else "off"
    return "none" if value is None or value == "" else str(value)


def _find_shown(one: str, other: str) -> int:
    """Returns from where on two texts are shown, so that where they begin to differ is in sight."""
    if max(len(one), len(other)) <= _SHOWN:
        return 0
    pairs = enumerate(zip(one, other, strict=False))
    differ = next((at for at, (left, right) in pairs if left != right), min(len(one), len(other)))
    return max(differ - _BEFORE, 0) if differ > _SHOWN - _BEFORE else 0


def _cut(text: str, start: int) -> str:
    """Returns as much of a text from `start` on as is shown."""
    begin = "..." if start else ""
    rest = text[start:]
    room = _SHOWN - len(begin)
    return begin + (rest if len(rest) <= room else f"{rest[: room - 3]}...")
