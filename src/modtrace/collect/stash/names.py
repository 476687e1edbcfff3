"""Selects the modules to be stashed by their names in `named_modules()`."""

import re
import warnings
from collections.abc import Collection
from functools import partial
from typing import Any

from ...errors import ModtraceWarning
from ...recording.options.path_filter import (
    REGEX_PREFIX,
    PathFilter,
    PathPattern,
    describe_unmatched,
    to_path_filter,
    to_patterns,
    unmatched,
)

#: One pattern, or a list of patterns.
NamePattern = None | str | re.Pattern[str] | list[str | re.Pattern[str]] | tuple[str | re.Pattern[str], ...]

#: The ways in which a text may be matched.
MATCHES = ("search", "exact", "glob")


def name_filter(include: NamePattern, exclude: NamePattern, match: str) -> PathFilter:
    """Returns a filter of names.

    Raises:
        TypeError: a pattern is neither a text nor a compiled expression.
        ValueError: `match` is unknown, a list is empty, or a glob cannot be read.
        re.error: a text for `search` is not a valid regular expression.
    """
    if match not in MATCHES:
        raise ValueError(f"match={match!r}: give 'search', 'exact' or 'glob'")
    if match == "glob":
        return to_path_filter(include, exclude)
    read = partial(_read_pattern, match)
    included = None if include is None else to_patterns("include", include, read)
    return PathFilter(included, () if exclude is None else to_patterns("exclude", exclude, read))


def warn_of_unmatched(chosen: PathFilter, names: Collection[str], root: str) -> None:
    """Warns about patterns of `include` that match no module, and suggests similar names."""
    for missing in unmatched(PathFilter(chosen.include), names):
        shown = missing.pattern.text
        given = shown.removeprefix(REGEX_PREFIX)  # we have added this prefix
        text = describe_unmatched([missing], names, root=root).replace(repr(shown), repr(given), 1)
        warnings.warn(
            f"{text}. Nothing of it is stashed; see `match` of modtrace.track() for how a text is read.",
            ModtraceWarning,
            stacklevel=4,
        )


def _read_pattern(match: str, where: str, given: Any) -> PathPattern:
    if isinstance(given, re.Pattern) and isinstance(given.pattern, str):
        return PathPattern(REGEX_PREFIX + given.pattern, given)
    if not isinstance(given, str):
        raise TypeError(f"{where}={given!r}: give a text, a compiled regular expression, or a list of those")
    if match == "exact":
        return PathPattern(given, re.compile(rf"\A{re.escape(given)}\Z"))
    return PathPattern(REGEX_PREFIX + given, re.compile(given))
