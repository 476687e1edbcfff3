"""Pairs the modules of two recordings by rules, and by equal paths where no rule applies."""

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, count
from typing import NamedTuple

import numpy as np

from ...recording.module_path import join
from ...recording.options.path_filter import REGEX_ONLY, REGEX_PREFIX, name_nearest
from ..tables.columns import Rows
from ..tables.placement import ModuleName
from .both import Runs, no_partners

#: The rule that stands for all proposed rules.
AUTO = "auto"


@dataclass(frozen=True)
class Rule:
    """A rule `EXPRESSION=PATH`. It applies to modules whose path the expression matches, and to modules inside them."""

    text: str
    source: str
    expression: re.Pattern[str]
    target: str

    def match(self, path: str) -> tuple[int, str] | None:
        """Returns how many characters of a path the rule matches, and the resulting path; None if it does not apply."""
        match = self.expression.match(path)
        if match is None:
            return None
        return match.end(), join(match.expand(self.target), path[match.end() :].removeprefix("."))


def read_rules(texts: Iterable[str]) -> tuple[Rule, ...]:
    """Returns the rules that the texts describe; the text `AUTO` is left out.

    Raises:
        ValueError: a text is not a valid rule.
    """
    return tuple(_read_rule(text) for text in texts if text != AUTO)


def _read_rule(text: str) -> Rule:
    source, equals, target = text.rpartition("=")
    if not equals:
        raise ValueError(
            f"map={text!r} is no rule: give EXPRESSION=PATH, such as "
            r"'model\.layers\.(\d+)=blocks.\1', where EXPRESSION is a regular expression for a path of the first "
            "recording"
        )
    try:
        expression = _compile(source, target)
    except (re.error, IndexError, OverflowError, RecursionError) as error:
        raise ValueError(f"map={text!r} cannot be read: {error}{_rewrite_glob(source, target)}") from error
    return Rule(text, source, expression, target)


def _compile(source: str, target: str) -> re.Pattern[str]:
    expression = re.compile(rf"(?:{source})(?=\.|\Z)" if source else "")
    expression.sub(target, "")  # raises if the target refers to a group that the expression lacks
    return expression


#: The wildcards of a glob, and the groups of a regular expression that stand for them.
_WILDCARDS = {"**": "(.*)", "*": "([^.]*)", "?": "([^.])"}
_WILDCARD = re.compile(r"(\*\*|\*|\?)")


def _rewrite_glob(source: str, target: str) -> str:
    """Returns the end of a sentence with the rule that is meant where a rule is written as a glob; else nothing."""
    expression = source.removeprefix(REGEX_PREFIX)
    if not {*expression} & {*REGEX_ONLY}:
        parts = _WILDCARD.split(expression)
        expression = "".join(_WILDCARDS.get(part, re.escape(part)) for part in parts)
    numbers = count(1)
    path = _WILDCARD.sub(lambda _: rf"\{next(numbers)}", target)
    if path == target and not (source.startswith(REGEX_PREFIX) or _WILDCARD.search(source)):
        return ""
    try:
        _compile(expression, path)
    except (re.error, IndexError):
        return "; a rule is a regular expression and not a glob"
    kind = "without re:" if source.startswith(REGEX_PREFIX) else "and not a glob"
    return f"; a rule is a regular expression {kind}: write '{expression}={path}'"


def apply_rules(rules: Sequence[Rule], path: str) -> list[str]:
    """Returns the paths of a module in the other recording, according to the rules that match most of its path.

    All rules that match equally much apply, as a fused projection has a rule for each of its parts. A module that no
    rule matches keeps its path.
    """
    matches = [match for rule in rules if (match := rule.match(path)) is not None]
    most = max((length for length, _ in matches), default=-1)
    return list(dict.fromkeys(target for length, target in matches if length == most)) or [path]


def map_paths(
    rules: Sequence[Rule], ones: Sequence[ModuleName], others: Sequence[ModuleName]
) -> list[list[str]]:
    """Returns for each module its paths in the other recording.

    Raises:
        ValueError: a rule matches no module, or yields only paths that the other recording lacks.
    """
    known, paths = {name.path for name in others}, [name.path for name in ones]
    for rule in rules:
        targets = [match[1] for path in paths if (match := rule.match(path)) is not None]
        if not targets:
            near = name_nearest(f"re:{rule.source}", sorted(paths))
            hint = _rewrite_glob(rule.source, rule.target)
            raise ValueError(f"map={rule.text!r} matches no module of the first recording{near}{hint}")
        if known.isdisjoint(targets):
            near = name_nearest(targets[0], sorted(known))
            raise ValueError(
                f"map={rule.text!r} makes the path {targets[0]!r}, which the second recording does not have{near}"
                f"{_rewrite_glob(rule.source, rule.target)}"
            )
    return [apply_rules(rules, path) for path in paths]


class Split(NamedTuple):
    """A module of one recording with several modules of the other that are its parts, such as a fused projection."""

    whole: int  # the index of the whole's place
    whole_in_a: bool
    parts: tuple[int, ...]  # the indices of the parts' places


@dataclass(frozen=True, eq=False)
class PlacePairs:
    """The places of the module trees of `a` and `b` that correspond."""

    partner: Rows  # for each place of `a`, its partner in `b`; -1 for none
    back: Rows  # for each place of `b`, its partner in `a`
    splits: tuple[Split, ...]

    def find_split(self, *, in_a: bool) -> Rows:
        """Returns the places of one recording that are parts, or that are wholes of parts."""
        places = [(split.whole,) if split.whole_in_a == in_a else split.parts for split in self.splits]
        return np.array([*chain.from_iterable(places)], np.int64)


def pair_places(runs: Runs, rules: Sequence[Rule]) -> PlacePairs:
    """Returns which places of the two module trees are partners.

    Raises:
        ValueError: a rule matches no module, or it matches several modules that are not parts of one.
    """
    links = _link(runs, rules)
    linked: dict[int, list[int]] = {}  # by the place of `b`, the linked places of `a`
    for place, others in links.items():
        for other in others:
            linked.setdefault(other, []).append(place)
    partner, back = no_partners(runs[0].names, runs[1].names)
    splits: list[Split] = []
    for other, places in linked.items():
        if len(places) > 1:
            splits.append(Split(other, False, tuple(places)))
        elif len(links[places[0]]) == 1:
            partner[places[0]], back[other] = other, places[0]
    splits += [Split(place, True, tuple(others)) for place, others in links.items() if len(others) > 1]
    for split in splits:
        _require_parts(split, runs, linked, links)
    return PlacePairs(partner, back, tuple(splits))


def _link(runs: Runs, rules: Sequence[Rule]) -> dict[int, list[int]]:
    """Returns for places of `a` the places of `b` that have the path which rules or equality demand.

    Rules take precedence over equal paths, and a rule that matches a module over one that matches a module around it.
    """
    roots = _pair_roots(runs)
    places_of: dict[tuple[str, str], list[int]] = {}
    for place, name in enumerate(runs[1].names):
        places_of.setdefault((name.root, name.path), []).append(place)
    by_rule: dict[int, list[int]] = {}
    by_path: dict[int, list[int]] = {}
    for place, (name, paths) in enumerate(
        zip(runs[0].names, map_paths(rules, runs[0].names, runs[1].names), strict=True)
    ):
        known = [places_of.get((roots.get(name.root, ""), path), []) for path in paths]
        if paths == [name.path]:
            by_path[place] = known[0]
        else:
            by_rule[place] = [others[0] for others in known if others]
    meant = {
        place: others
        for place, others in by_rule.items()
        if any(rule.expression.fullmatch(runs[0].names[place].path) for rule in rules)
    }
    taken = {*chain.from_iterable(meant.values())}
    by_rule = {
        place: [other for other in others if other not in taken] for place, others in by_rule.items()
    } | meant
    taken = {*chain.from_iterable(by_rule.values())}
    for place, others in by_path.items():  # places share a path where a module was replaced
        by_path[place] = [other for other in others if other not in taken][:1]
        taken.update(by_path[place])
    return by_rule | by_path


def _require_parts(
    split: Split, runs: Runs, linked: Mapping[int, Sequence[int]], links: Mapping[int, Sequence[int]]
) -> None:
    of_whole, of_parts = runs if split.whole_in_a else runs[::-1]
    others = linked if split.whole_in_a else links
    counts = [of_parts.places.places[part].module.parameters or 0 for part in split.parts]
    whole = of_whole.places.places[split.whole].module.parameters or 0
    if whole and sum(counts) == whole and all(len(others[part]) == 1 for part in split.parts):
        return
    ones = " and ".join(repr(of_parts.names[part].path) for part in split.parts)
    raise ValueError(
        f"the rules of map (--map) make {ones} one with {of_whole.names[split.whole].path!r}, and they are not "
        f"its parts: they have {' + '.join(map(str, counts))} parameters, and it has {whole}. Give a rule for each."
    )


def _pair_roots(runs: Runs) -> dict[str, str]:
    """Returns for roots of `a` the root of `b`: the one of the same name, else the only one, else the one in order."""
    names = [list(dict.fromkeys(name.root for name in side.names)) for side in runs]
    common = {name: name for name in names[0] if name in names[1]}
    rest = [[name for name in roots if name not in common] for roots in names]
    return common | dict(zip(*rest, strict=False))
