"""Finds the modules that only one of two runs has and from whose outputs the other's were computed otherwise."""

from collections.abc import Set

import numpy as np

from ...recording.phase import FORWARD, PHASES
from ..tables.placement import ModuleName
from .answer import FIRST, SECOND, UnpairedModule
from .culprits import Culprit, find_unpaired_before
from .paired_run import PairedRun
from .pairs import ComparedPairs

_FORWARD = PHASES.index(FORWARD)


def find_unpaired_modules(pairs: ComparedPairs, pair: int, culprit: Culprit) -> tuple[UnpairedModule, ...]:
    """Returns for each run the outermost module without a partner that ran last before a pair's tensor was computed.

    With ops it is one in which an op ran from whose output the tensor was computed; else the module that was called
    last inside the tensor's module, or before it.
    """
    found = list[UnpairedModule]()
    if pairs.recompute_of is not None:
        return ()
    for name, paired in ((FIRST, {*pairs.modules.values()}), (SECOND, {*pairs.modules})):
        run = pairs.run(name)
        places = _list_places(run, pair, culprit.op if culprit.is_unpaired and culprit.run == name else -1)
        unpaired = (_climb(run, place, paired) for place in places)
        place = next((place for place in unpaired if place >= 0), -1)
        if place >= 0:
            module = run.tables.names[place]
            found.append(UnpairedModule(name=f"{module.path or module.root} ({module.type})", only_in=name))
    return tuple(found)


def _list_places(run: PairedRun, pair: int, culprit: int) -> list[int]:
    """Returns the places of what ran before a pair's tensor and may be unpaired, the nearest first."""
    calls, op, row = run.tables.calls, int(run.op[pair]), int(run.rows[pair])
    ops = [culprit] if culprit >= 0 else []
    ops += find_unpaired_before(run, op) if op >= 0 else []
    before = [int(run.tables.ops.call[ran]) for ran in ops]
    if op < 0 and not ops:
        before = [_find_call_before(run, int(run.tables.values.call[row]))]
    return [int(calls.place[call]) for call in before if call >= 0]


def _find_call_before(run: PairedRun, call: int) -> int:
    """Returns the last forward call inside a call, or else the last one before it inside the same call; -1 for none."""
    calls = run.tables.calls
    if call < 0:
        return -1
    is_forward = (calls.phase == _FORWARD) & calls.kept
    rows = np.flatnonzero(is_forward & (calls.parent == call))
    if not len(rows) and calls.parent[call] >= 0:
        is_before = calls.start_ns < calls.start_ns[call]
        rows = np.flatnonzero(is_forward & is_before & (calls.parent == calls.parent[call]))
    return int(rows[np.argmax(calls.start_ns[rows])]) if len(rows) else -1


def _climb(run: PairedRun, place: int, paired: Set[ModuleName]) -> int:
    """Returns the outermost of the modules from a place on outwards that have no partner; -1 if that at it has one.

    A module around one that has a partner is a wrapper, and counts as if it had one, too.
    """
    unpaired, wrappers = -1, _find_around(run, paired)
    while place >= 0 and place not in wrappers:
        unpaired, place = place, run.tables.places.places[place].parent
    return unpaired


def _find_around(run: PairedRun, paired: Set[ModuleName]) -> Set[int]:
    """Returns the places of modules that have a partner, and of all modules around them."""
    around = set[int]()
    for place, name in enumerate(run.tables.names):
        while name in paired and place >= 0 and place not in around:
            around.add(place)
            place = run.tables.places.places[place].parent
    return around
