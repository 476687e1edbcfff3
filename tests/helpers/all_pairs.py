"""The pairs and the ports in one table, each recorded once in a process."""

from functools import cache

import modtrace
from modtrace.analysis.divergence.answer import Comparison

from .pairs import PAIRS, Pair, record
from .ported_pairs import KINDS, pair_of

#: The name of each pair, and of each port with each of its faults.
TABLE: dict[str, Pair] = {
    **PAIRS,
    **{f"{kind}, {fault}": pair_of(kind, fault) for kind, each in KINDS.items() for fault in each.faults},
}

#: Of each pair, and of each port once: its name in TABLE.
HEALTHY = {
    **{name: name for name in PAIRS},
    **{kind: f"{kind}, {next(iter(each.faults))}" for kind, each in KINDS.items()},
}


def compare(name: str, *, is_planted: bool) -> Comparison:
    """What ours says of a pair."""
    first, second = first_of(name), second_of(name, is_planted=is_planted)
    return modtrace.compare(first, second, noise=noise_of(name), **TABLE[name].options)


def first_of(name: str) -> modtrace.Recording:
    """The recording of the first run, which all faults of a port share."""
    kind = name.partition(",")[0]
    return _first(HEALTHY[kind] if kind in KINDS else name)


@cache
def _first(name: str) -> modtrace.Recording:
    return record(TABLE[name].first(), ops=TABLE[name].ops)


@cache
def second_of(name: str, *, is_planted: bool) -> modtrace.Recording:
    return record(TABLE[name].second(is_planted), ops=TABLE[name].ops)


@cache
def noise_of(name: str) -> list[modtrace.Recording]:
    """Another recording of the first run, if that is what the noise is measured by."""
    return [record(TABLE[name].first(), ops=TABLE[name].ops)] if TABLE[name].noise else []
