"""Selects modules and parameters by patterns: globs over dotted paths, and regular expressions."""

import re
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from itertools import zip_longest
from operator import itemgetter
from typing import Any, NamedTuple

from ..suggestions import first_few

#: The prefix of a text that is a regular expression rather than a glob.
REGEX_PREFIX = "re:"

#: Characters that mean something in regular expressions, and stand for themselves in globs.
REGEX_ONLY = r"\^$(|+"

#: The flags that such a text can contain, by their letters.
_FLAGS = {"a": re.ASCII, "i": re.IGNORECASE, "m": re.MULTILINE, "s": re.DOTALL, "x": re.VERBOSE}

_SHOWN = 5


@dataclass(frozen=True)
class PathPattern:
    """A pattern: `text` is stored and shown, `expression` is searched in paths."""

    text: str
    expression: re.Pattern[str]

    def matches(self, path: str) -> bool:
        """Returns whether the pattern matches a path."""
        return self.expression.search(path) is not None


@dataclass(frozen=True)
class PathFilter:
    """Selects paths that `include` matches (all paths, if it is None) and `exclude` does not."""

    include: tuple[PathPattern, ...] | None = None
    exclude: tuple[PathPattern, ...] = ()

    @property
    def is_all(self) -> bool:
        """True if the filter selects everything."""
        return self.include is None and not self.exclude

    def selects(self, *paths: str) -> bool:
        """Returns whether the filter selects a thing with these paths; a parameter has its own path and its
        module's.
        """
        if self.include is not None and not _any_matches(self.include, paths):
            return False
        return not _any_matches(self.exclude, paths)

    def to_json(self) -> dict[str, list[str] | None]:
        """Returns the patterns as texts, from which `to_path_filter(**texts)` makes the filter again."""
        include = None if self.include is None else [pattern.text for pattern in self.include]
        return {"include": include, "exclude": [pattern.text for pattern in self.exclude] or None}


class Unmatched(NamedTuple):
    """A pattern that matches nothing, and the name of its argument."""

    argument: str
    pattern: PathPattern


def to_path_filter(
    include: object = None, exclude: object = None, *, argument: str = "include"
) -> PathFilter:
    """Returns the filter for the user's arguments `include` and `exclude`.

    A glob is for the whole path: `*` and `?` stay within one part, `[abc]` and `[!abc]` are one character,
    `**` goes across parts. `**.attn` is any `attn`, `blocks.**` is all that lies inside `blocks`, `""` is the
    root. A path that contains such characters also matches itself.

    Args:
        include: a glob; a compiled regular expression, or a text that begins with `re:`, both searched in the
            path; a list or tuple of those; None for everything.
        exclude: the same, for paths to leave out of those; None for none.
        argument: the name of the argument `include`, for errors.

    Raises:
        TypeError: it is something else.
        ValueError: it is empty, or it cannot be read as a glob or as a regular expression.
    """
    included = None if include is None else to_patterns(argument, include)
    return PathFilter(included, () if exclude is None else to_patterns("exclude", exclude))


def unmatched(path_filter: PathFilter, paths: Collection[str]) -> list[Unmatched]:
    """Returns the patterns that match none of the paths, those of `include` first."""
    patterns = [("include", pattern) for pattern in path_filter.include or ()]
    patterns += [("exclude", pattern) for pattern in path_filter.exclude]
    return [
        Unmatched(argument, pattern) for argument, pattern in patterns if not _any_matches((pattern,), paths)
    ]


def describe_unmatched(
    found: Iterable[Unmatched], paths: Collection[str], *, what: str = "module", root: str | None = None
) -> str:
    """Returns the message for patterns that match nothing, with the nearest paths.

    Args:
        found: what `unmatched` returned.
        paths: the existing paths.
        what: the kind of thing that has those paths, such as "module or parameter".
        root: the name of the root, shown beside its empty path.
    """
    return ". ".join(_describe(missing, paths, what, root) for missing in found)


def to_patterns(
    argument: str, given: object, read: Callable[[str, Any], PathPattern] | None = None
) -> tuple[PathPattern, ...]:
    """Returns one pattern or several as a tuple.

    Args:
        argument: the name of the argument, for an error.
        given: a single pattern, or a list or tuple of patterns.
        read: makes a pattern of the name of its argument and its value; None: as in `to_path_filter`.

    Raises:
        ValueError: the list is empty.
    """
    read = read or _to_pattern
    if not isinstance(given, (list, tuple)):
        return (read(argument, given),)
    if not given:
        raise ValueError(f"{argument}={given!r} holds no pattern. Give at least one, or None to do without.")
    return tuple(read(f"{argument}[{place}]", pattern) for place, pattern in enumerate(given))


def _any_matches(patterns: Iterable[PathPattern], paths: Collection[str]) -> bool:
    return any(pattern.matches(path) for pattern in patterns for path in paths)


# Reading the user's arguments.


def _to_pattern(where: str, given: object) -> PathPattern:
    if isinstance(given, str):
        is_regex = given.startswith(REGEX_PREFIX)
        return PathPattern(given, _read_regex(where, given) if is_regex else _read_glob(where, given))
    if isinstance(given, re.Pattern) and isinstance(given.pattern, str):
        letters = "".join(letter for letter, flag in _FLAGS.items() if given.flags & flag)
        flags = f"(?{letters})" if letters else ""
        return PathPattern(REGEX_PREFIX + flags + given.pattern, given)
    raise TypeError(
        f"{where}={_short(repr(given))}: give a glob such as 'blocks.*.attn', a regular expression, "
        "or a list of those"
    )


def _read_regex(where: str, text: str) -> re.Pattern[str]:
    source = text.removeprefix(REGEX_PREFIX)
    try:
        return re.compile(source)
    except (re.error, OverflowError, RecursionError) as error:
        reason = getattr(error, "msg", str(error)) + _place_in(source, getattr(error, "pos", None))
        raise ValueError(
            f"{where}={text!r} is not a regular expression: {reason}. "
            "Correct it, or leave out 're:' for a glob."
        ) from error


def _place_in(source: str, position: int | None) -> str:
    if position is None:
        return ""
    rest = _short(source[position:], 20)
    return f" at position {position} of {source!r}, " + (f"before {rest!r}" if rest else "its end")


def _short(text: str, most: int = 80) -> str:
    return text if len(text) <= most else text[: most - 1] + "…"


# Globs.


class _BadGlob(Exception):
    """Raised for a glob that cannot be read; says what is wrong, and where."""


def _read_glob(where: str, glob: str) -> re.Pattern[str]:
    try:
        return re.compile(rf"(?s)\A(?:{_translate(glob)}|{re.escape(glob)})\Z")
    except _BadGlob as error:
        raise ValueError(
            f"{where}={glob!r} is not a glob: {error}. Correct it ([[] is a [ itself), or begin with "
            "'re:' for an expression."
        ) from error


def _translate(glob: str) -> str:
    """Returns the regular expression for a glob. It always matches in polynomial time."""
    parts: list[str] = []
    at = 0
    while at < len(glob):
        if glob[at] in "*[":
            text, at = (_stars if glob[at] == "*" else _class)(glob, at)
        else:
            text, at = "[^.]" if glob[at] == "?" else re.escape(glob[at]), at + 1
        parts.append(text)
    return "".join(parts)


def _stars(glob: str, at: int) -> tuple[str, int]:
    end = at
    while glob[end : end + 1] == "*":
        end += 1
    begins_part = at == 0 or glob[at - 1] == "."
    if end - at == 1:
        is_part = begins_part and glob[end : end + 1] in ("", ".")
        return ("[^.]+" if is_part else "[^.]*"), end
    if begins_part and glob[end : end + 1] == ".":
        return r"(?:[^.]+\.)*", end + 1
    return (".+" if begins_part and at > 0 and end == len(glob) else ".*"), end


def _class(glob: str, at: int) -> tuple[str, int]:
    start = at + 2 if glob[at + 1 : at + 2] == "!" else at + 1
    end = glob.find("]", start + 1)  # a `]` right at the beginning is a member, as in a shell
    if end < 0:
        raise _BadGlob(f"the [ at position {at} is not closed")
    negated = "^" if start > at + 1 else ""
    return rf"(?!\.)[{negated}{_members(glob, start, end)}]", end + 1


def _members(glob: str, start: int, end: int) -> str:
    parts: list[str] = []
    at = start
    while at < end:
        if glob[at + 1] == "-" and at + 2 < end:
            low, high = glob[at], glob[at + 2]
            if low > high:
                raise _BadGlob(f"the range {low}-{high} at position {at} is the wrong way round")
            parts.append(f"{_escaped(low)}-{_escaped(high)}")
            at += 3
        else:
            parts.append(_escaped(glob[at]))
            at += 1
    return "".join(parts)


def _escaped(character: str) -> str:
    """Escapes a member of a character class. `re.escape` leaves some unescaped, and `re` warns of two in a row."""
    return character if character.isalnum() else "\\" + character


# Finding similar paths.


def _describe(found: Unmatched, paths: Collection[str], what: str, root: str | None) -> str:
    text = found.pattern.text
    is_regex = not text.startswith(REGEX_PREFIX) and {*text} & {*REGEX_ONLY}
    hint = (
        f"; it is a glob: a regular expression begins with re: as in '{REGEX_PREFIX}{text}'"
        if is_regex
        else ""
    )
    return f"{found.argument}={text!r} matches no {what}{name_nearest(text, paths, root)}{hint}"


def name_nearest(text: str, paths: Collection[str], root: str | None = None) -> str:
    """Returns the end of a sentence that names the paths nearest to a pattern, or just the first paths."""
    if not paths:
        return ": there is none"
    near = _nearest(text, paths)
    if near:
        return f"; the nearest are: {', '.join(_shown(path, root) for path in near)}"
    return f"; there are: {first_few([_shown(path, root) for path in paths], _SHOWN)}"


def _shown(path: str, root: str | None) -> str:
    return path or (f'"" ({root})' if root else '""')


def _nearest(text: str, paths: Collection[str]) -> list[str]:
    """Returns the paths most similar to a pattern: as a whole, or else in their last parts, as many as the pattern has.

    Those with the pattern's own numbers come first, and of other layers the nearest. It takes up to 0.4 s for 20,000
    paths, less if they differ only in numbers.
    """
    given, is_tail = _read_end_of_pattern(text)
    wanted, count = ".".join(_outline(given)), given.count(".") + 1
    for parts in ([] if is_tail else [0]) + [count]:
        alike: dict[str, list[tuple[int, str]]] = {}
        for path in paths:
            distance = _numbers_apart(given.split("."), path.split(".")[-parts:])
            alike.setdefault(".".join(_outline(path)[-parts:]), []).append((distance, path))
        near = [
            sorted(alike[outline], key=itemgetter(0)) for outline in get_close_matches(wanted, alike, _SHOWN)
        ]
        if near:
            found = [pair for pairs in near for pair in pairs]
            return [path for _, path in sorted(found, key=lambda pair: pair[0] > 0)][:_SHOWN]
    return []


def _numbers_apart(parts: Sequence[str], others: Sequence[str]) -> int:
    """Returns how far the numbers in the parts of a pattern are from those of a path; 1 for each that this lacks."""
    pairs = zip_longest(parts, others[: len(parts)], fillvalue="")
    return sum(
        abs(int(one) - int(other)) if other.isdecimal() else 1 for one, other in pairs if one.isdecimal()
    )


def _outline(path: str) -> list[str]:
    """Returns the parts of a path in lower case, with `*` for numbers.

    All layers of a list are thus equally near.
    """
    return ["*" if part.isdigit() or part == "?" else part for part in path.casefold().split(".")]


def _read_end_of_pattern(text: str) -> tuple[str, bool]:
    """Returns what follows a pattern's last `**`, as a path, and whether paths may have further parts before it."""
    if text.startswith(REGEX_PREFIX):
        text = re.sub(r"\\[dw][+*]?|(?<!\\)\.[+*]\??", "*", text.removeprefix(REGEX_PREFIX))
        text = re.sub(r"\(\?\w+\)|[^\w.*[\]-]", "", text)
    _, stars, end = re.sub(r"\[[^]]+\][+*]?", "*", text).removesuffix(".**").rpartition("**.")
    return end, bool(stars)
