"""Reads rules of how modules of one recording are called in the other: `model\\.layers\\.(\\d+)=blocks.\\1`."""

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from ...recording.module_path import join
from ...recording.options.path_filter import name_nearest
from ...surface import name_argument
from .contract import ModuleName

#: The rule that stands for all the rules that are proposed.
AUTO = "auto"


@dataclass(frozen=True)
class Rule:
    """A rule; it applies to a module whose path `expression` matches, and to all modules inside."""

    text: str
    source: str
    expression: re.Pattern[str]
    target: str

    def match(self, path: str) -> tuple[int, str] | None:
        """Returns how much of a path the rule matches, and the path that it makes of it; None if it does not apply."""
        found = self.expression.match(path)
        if found is None:
            return None
        return found.end(), join(found.expand(self.target), path[found.end() :].removeprefix("."))


def read_rules(texts: Iterable[str]) -> tuple[Rule, ...]:
    """Returns the rules of these texts; `AUTO` is left out.

    Raises:
        ValueError: a text is no rule.
    """
    return tuple(_read_rule(text) for text in texts if text != AUTO)


def _read_rule(text: str) -> Rule:
    source, equals, target = text.rpartition("=")
    if not equals:
        raise ValueError(
            f"{name_argument('map', text)} is no rule: give EXPRESSION=PATH, such as "
            r"'model\.layers\.(\d+)=blocks.\1', where EXPRESSION is a regular expression for a path of the first "
            "recording"
        )
    try:
        expression = re.compile(rf"(?:{source})(?=\.|\Z)" if source else "")
        expression.sub(target, "")  # raises for a reference to a group that is not there
    except (re.error, IndexError, OverflowError, RecursionError) as error:
        raise ValueError(f"{name_argument('map', text)} cannot be read: {error}") from error
    return Rule(text, source, expression, target)


def apply_rules(rules: Sequence[Rule], path: str) -> list[str]:
    """Returns the paths that a module has in the other recording: by the rules that match most of its path.

    Several rules that match equally much all apply: a fused projection has a rule for each of its parts. A module that
    no rule matches keeps its path.
    """
    found = [match for rule in rules if (match := rule.match(path)) is not None]
    most = max((length for length, _ in found), default=-1)
    return list(dict.fromkeys(made for length, made in found if length == most)) or [path]


def map_paths(
    rules: Sequence[Rule], ones: Sequence[ModuleName], others: Sequence[ModuleName]
) -> list[list[str]]:
    """Returns for each module the paths that it has in the other recording.

    Raises:
        ValueError: a rule matches no module, or makes of them only paths that the other recording does not have.
    """
    known, paths = {name.path for name in others}, [name.path for name in ones]
    for rule in rules:
        _require(rule, [match[1] for path in paths if (match := rule.match(path)) is not None], known, paths)
    return [apply_rules(rules, path) for path in paths]


def _require(rule: Rule, made: Sequence[str], known: set[str], paths: Sequence[str]) -> None:
    rule_name = name_argument("map", rule.text)
    if not made:
        near = name_nearest(f"re:{rule.source}", sorted(paths))
        raise ValueError(f"{rule_name} matches no module of the first recording{near}")
    if known.isdisjoint(made):
        near = name_nearest(made[0], sorted(known))
        raise ValueError(
            f"{rule_name} makes the path {made[0]!r}, which the second recording does not have{near}"
        )
