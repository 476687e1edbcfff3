"""Proposes rules for modules that have different names in two recordings."""

import re
from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from itertools import product
from typing import NamedTuple

import numpy as np

from ...recording.module_path import path_and_above
from ..tables.columns import Partners, number_keys, number_texts, take
from ..tables.run import RunTables
from ..tables.tensors import number_sizes
from .both import Runs, for_both, no_partners, number_partners
from .leaves import LeafModule, Likeness, find_leaves, join_siblings
from .modules import PlacePairs, Rule, apply_rules, read_rules
from .sequences import align_sequences


class PairedLeaves(NamedTuple):
    """The leaves of both recordings, and pairs of positions of corresponding leaves."""

    a: Sequence[LeafModule]
    b: Sequence[LeafModule]
    by_weights: Mapping[int, int]  # leaves whose weights are equal, and differ from those of all other leaves
    same: Mapping[int, int]  # `by_weights`, and alike leaves beside or next to those


def read_leaves(runs: Runs) -> PairedLeaves:
    """Returns the leaves of two recordings; siblings that may be parts of one are joined into one leaf."""
    leaves = for_both(find_leaves, runs)
    joined = for_both(join_siblings, runs, leaves, leaves[::-1])
    ones, others = for_both(_find_unique, joined)
    by_weights = {leaf: others[key] for key, leaf in ones.items() if key in others}
    same = by_weights | _pair_siblings(runs, joined, by_weights)
    return PairedLeaves(*joined, by_weights, _add_neighbours(joined, same))


def unpair_containers(
    runs: Runs, places: PlacePairs, leaves: PairedLeaves, rules: Sequence[Rule]
) -> PlacePairs:
    """Returns the pairs of places without container pairs that contradict the leaves with equal weights.

    A pair contradicts them if it is around only one of two such leaves. A pair that a rule demands stays.
    """
    partner, back = places.partner.copy(), places.back.copy()
    is_meant = [any(rule.expression.fullmatch(name.path) for rule in rules) for name in runs[0].names]
    for leaf, leaf_b in leaves.by_weights.items():
        around, around_b = for_both(
            _find_around, runs, (leaves.a[leaf].places[0], leaves.b[leaf_b].places[0])
        )
        for one, other in [
            *((place, int(partner[place])) for place in around),
            *((int(back[place]), place) for place in around_b),
        ]:
            if one >= 0 and other >= 0 and not is_meant[one] and (one in around) != (other in around_b):
                partner[one], back[other] = -1, -1
    return replace(places, partner=partner, back=back)


def _find_around(side: RunTables, place: int) -> set[int]:
    """Returns the places of all modules around a module."""
    around = set[int]()
    while (place := side.places.places[place].parent) >= 0:
        around.add(place)
    return around


def propose_rules(runs: Runs, places: PlacePairs, leaves: PairedLeaves) -> tuple[str, ...]:
    """Returns rules for modules without partner that agree in parameters and outputs, in the order of their calls.

    Equal weights count more than the order of calls. Equal names do not count if a module's weights, or those of a
    sibling, belong to a module of another name in the other recording.
    """
    partner, back = _doubt_moved(runs, places, leaves)
    if not ((partner < 0).any() and (back < 0).any()):
        return ()
    links = [
        link
        for leaf, leaf_b in _align_leaves(runs, leaves, (partner, back))
        for link in product(leaves.a[leaf].places, leaves.b[leaf_b].places)
    ]
    links += _pair_containers(runs, links)
    named = [
        (runs[0].names[place].path, path)
        for place, place_b in dict.fromkeys(links)
        if partner[place] < 0
        and back[place_b] < 0
        and places.partner[place] != place_b
        and "=" not in (path := runs[1].names[place_b].path)  # a rule cannot contain `=` in its target
    ]
    renamed = {path for path, _ in named}
    kept = [
        (name.path, runs[1].names[place_b].path)
        for name, place_b in zip(runs[0].names, places.partner.tolist(), strict=True)
        if place_b >= 0 and name.path not in renamed
    ]
    return tuple(_choose_rules(named, kept))


def _doubt_moved(runs: Runs, places: PlacePairs, leaves: PairedLeaves) -> Partners:
    """Returns the partners of all places, cleared for siblings of modules whose weights are elsewhere in the other.

    The reason is that indices shift where a Sequential has one layer more.
    """
    partner, back = partners = places.partner.copy(), places.back.copy()
    same = [(leaves.a[leaf].places[0], leaves.b[leaf_b].places[0]) for leaf, leaf_b in leaves.same.items()]
    same = [(one, other) for one, other in same if partner[one] >= 0 and partner[one] != other]
    for run, own, moved in zip(runs, partners, np.array(same, np.int64).reshape(-1, 2).T, strict=True):
        parent = np.array([place.parent for place in run.places.places], np.int64)
        is_container = np.isin(np.arange(len(parent)), parent)
        own[np.isin(parent, parent[moved]) & ~is_container] = -1
    partner[(partner >= 0) & (take(back, partner) < 0)] = -1
    back[(back >= 0) & (take(partner, back) < 0)] = -1
    return partners


def _pair_siblings(
    runs: Runs, leaves: tuple[Sequence[LeafModule], Sequence[LeafModule]], same: Mapping[int, int]
) -> dict[int, int]:
    """Returns pairs of alike leaves whose siblings are paired already, if both modules have equally many of them."""
    above, above_b = parents = for_both(
        lambda run, leaves: [run.places.places[leaf.places[0]].parent for leaf in leaves], runs, leaves
    )
    partners: dict[int, set[int]] = defaultdict(set)
    back: dict[int, set[int]] = defaultdict(set)
    for leaf, leaf_b in same.items():
        partners[above[leaf]].add(above_b[leaf_b])
        back[above_b[leaf_b]].add(above[leaf])
    ones, others = for_both(_group_alike, leaves, parents, (same.keys(), {*same.values()}))
    siblings: dict[int, int] = {}
    for (parent, likeness), group in ones.items():
        if len(partners[parent]) != 1 or len(back[parent_b := next(iter(partners[parent]))]) != 1:
            continue
        group_b = others.get((parent_b, likeness), [])
        if len(group) == len(group_b):
            siblings |= zip(group, group_b, strict=True)
    return siblings


def _add_neighbours(
    leaves: tuple[Sequence[LeafModule], Sequence[LeafModule]], same: Mapping[int, int]
) -> dict[int, int]:
    """Returns the pairs of leaves, extended by alike leaves that are called right before or after paired ones."""
    ones, others = leaves
    found, taken = dict(same), {*same.values()}
    waiting = list(same)
    while waiting:
        at = waiting.pop()
        for step in (1, -1):
            one, other = at + step, found[at] + step
            if not (0 <= one < len(ones) and 0 <= other < len(others)) or one in found or other in taken:
                continue
            if ones[one].parameters and ones[one].likeness == others[other].likeness:
                found[one] = other
                taken.add(other)
                waiting.append(one)
    return found


def _group_alike(
    leaves: Sequence[LeafModule], parents: Sequence[int], taken: Collection[int]
) -> dict[tuple[int, Likeness], list[int]]:
    """Returns the leaves with parameters that are not in `taken`, by their parent module and their likeness."""
    groups: dict[tuple[int, Likeness], list[int]] = defaultdict(list)
    for number, (leaf, parent) in enumerate(zip(leaves, parents, strict=True)):
        if number not in taken and leaf.parameters and len(leaf.places) == 1:
            groups[parent, leaf.likeness].append(number)
    return groups


def _find_unique(leaves: Sequence[LeafModule]) -> dict[tuple[float, ...], int]:
    """Returns the leaf for each content of weights that only one leaf has."""
    known: dict[tuple[float, ...], list[int]] = defaultdict(list)
    for number, leaf in enumerate(leaves):
        if leaf.weights.content:
            known[leaf.weights.content].append(number)
    return {content: numbers[0] for content, numbers in known.items() if len(numbers) == 1}


def _align_leaves(runs: Runs, leaves: PairedLeaves, partners: Partners) -> list[tuple[int, int]]:
    """Returns pairs of leaves: those known to be the same, and alike ones in the order of their calls."""
    one, other = both = [
        np.array([(leaf.places[0], leaf.output, leaf.parameters) for leaf in known], np.int64)
        .reshape(-1, 3)
        .T
        for known in (leaves.a, leaves.b)
    ]
    known = for_both(lambda number, columns: take(number, columns[0]), number_partners(*partners), both)
    anchor = no_partners(one[0], other[0])
    anchor[0][[*leaves.same]] = anchor[1][[*leaves.same.values()]] = [*leaves.same]
    shapes = number_sizes(runs[0].values.sizes, runs[1].values.sizes)
    shape = for_both(lambda number, columns: take(number, columns[1]), shapes, both)
    kinds, weights = (
        number_texts([read(leaf) for leaf in leaves.a], [read(leaf) for leaf in leaves.b])
        for read in (lambda leaf: leaf.kind, lambda leaf: str(leaf.weights.squeezed))
    )
    loose = number_keys(known, anchor, (one[2], other[2]), kinds)
    alike = number_keys(loose, weights)
    pairs = align_sequences(number_keys(alike, shape), alike, loose).tolist()
    return [
        *leaves.same.items(),
        *(
            (leaf, leaf_b)
            for leaf, leaf_b in pairs
            if leaf not in leaves.same
            and (known[0][leaf] >= 0 or not leaves.a[leaf].is_unlike(leaves.b[leaf_b]))
        ),
    ]


def _pair_containers(runs: Runs, links: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    """Returns pairs of modules around the same pairs of modules; those that are never called are paired apart."""
    pairs: list[tuple[int, int]] = []
    around, around_b = for_both(_group_around, runs, np.array(links, np.int64).reshape(-1, 2).T.tolist())
    for inside, ones in around.items():
        others = around_b.get(inside, [])
        of_type = {runs[1].names[place].type: place for place in reversed(others)}
        alike = {place: of_type[name] for place in ones if (name := runs[0].names[place].type) in of_type}
        if len(ones) != len(others) and len({*alike.values()}) == len(alike):
            pairs.extend(alike.items())
            ones = [place for place in ones if place not in alike]
            others = [place for place in others if place not in alike.values()]
        pairs.extend(zip(ones, others, strict=False))
    return pairs


def _group_around(side: RunTables, leaves: Sequence[int]) -> Mapping[tuple[frozenset[int], bool], list[int]]:
    """Returns the places around leaves, outer ones first, by the leaves inside and by whether they are called."""
    inside: dict[int, set[int]] = defaultdict(set)
    places = side.places.places
    for number, at in enumerate(leaves):
        while (at := places[at].parent) >= 0:
            inside[at].add(number)
    called = set(np.unique(side.calls.place[side.calls.kept]).tolist())
    grouped: dict[tuple[frozenset[int], bool], list[int]] = defaultdict(list)
    for at in sorted(inside, key=lambda at: len(path_and_above(places[at].path))):
        grouped[frozenset(inside[at]), at in called].append(at)
    return grouped


# Rules are derived from pairs of paths, so that one rule covers many modules.


def _choose_rules(named: Sequence[tuple[str, str]], kept: Sequence[tuple[str, str]]) -> list[str]:
    """Returns few rules that yield these pairs of paths; a rule for an outer module may imply inner ones.

    No rule for several paths matches one that is paired otherwise, in `named` or in `kept`.
    """
    grouped: dict[str, dict[str, list[tuple[str, str]]]] = defaultdict(lambda: defaultdict(list))
    for one, other in sorted(named, key=lambda pair: pair[0].count(".")):
        expression, target = _generalize(one, other)
        grouped[expression][target].append((one, other))
    meant: dict[str, set[str]] = defaultdict(set)
    for one, other in (*named, *kept):
        meant[one].add(other)
    chosen: list[str] = []
    rules: list[Rule] = []
    for expression, targets in grouped.items():
        for target, pairs in targets.items():
            if all(other in apply_rules(rules, one) for one, other in pairs):
                continue
            single = [f"{re.escape(one)}={_escape(other)}" for one, other in pairs]
            general = [f"{expression}={target}", f"{_list_indices(expression, pairs)}={target}"]
            fitting = [text for text in general if len(pairs) > 1 and _fit(read_rules([text]), meant)]
            chosen += fitting[:1] or single
            rules += read_rules(fitting[:1] or single)
    return chosen


def _fit(rules: Sequence[Rule], meant: Mapping[str, Collection[str]]) -> bool:
    """Returns whether rules give each path that they match to its end one of those that are meant."""
    matches = ((path, rule.match(path)) for path in meant for rule in rules)
    return all(match is None or match[0] < len(path) or match[1] in meant[path] for path, match in matches)


def _list_indices(expression: str, pairs: Sequence[tuple[str, str]]) -> str:
    """Returns an expression whose groups match only the indices that the paths have there."""
    found = [re.fullmatch(expression, one) for one, _ in pairs]
    for indices in zip(*(match.groups() for match in found if match is not None), strict=True):
        expression = expression.replace(_INDEX, f"({'|'.join(dict.fromkeys(indices))})", 1)
    return expression


#: The group of a rule that stands for any index.
_INDEX = r"(\d+)"


def _generalize(one: str, other: str) -> tuple[str, str]:
    """Returns a rule for a pair of paths: an expression with groups for shared indices, and the path to it."""
    parts = one.split(".")
    left = [at for at, part in enumerate(parts) if part.isdigit()]
    group_of: dict[int, int] = {}  # the number of the group for each part of the path
    target = []
    for part in other.split("."):
        at = next((at for at in left if parts[at] == part), None)
        if at is not None:
            left = [later for later in left if later > at]
            group_of[at] = len(group_of) + 1
        target.append(_escape(part) if at is None else rf"\{group_of[at]}")
    expression = (_INDEX if at in group_of else re.escape(part) for at, part in enumerate(parts))
    return r"\.".join(expression), ".".join(target)


def _escape(path: str) -> str:
    """Returns a path escaped for use in a rule."""
    return path.replace("\\", r"\\")
