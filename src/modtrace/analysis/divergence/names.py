"""Names compared tensors and what only one recording has, and explains why nothing could be compared."""

from collections.abc import Callable, Iterator
from difflib import get_close_matches
from typing import Any

import numpy as np

from ...recording.module_path import join
from ...recording.phase import PHASES
from ...recording.role import BY_NAME
from ...recording.suggestions import count_of
from ...surface import choose_phrase
from ..alignment.contract import HARMLESS, REASONS, Alignment, Unpaired, UnpairedRows
from ..graph.parts import forms_of_op
from ..tables.chosen_step import name_steps
from ..tables.columns import Column, Rows
from ..tables.placement import ModuleName
from ..tables.run import RunTables
from .answer import Named, OneSided

#: At most so many places of a kind are listed; the last one says how many more there are.
_LISTED = 1000

#: Why a tensor of an op has no partner that is not told by the alignment: it has another number of elements.
SHAPE = "shape"


class Names:
    """Finds the names of rows of one recording."""

    def __init__(self, side: RunTables) -> None:
        self._side = side

    def site(self, row: int) -> dict[str, Any]:
        """Returns the site of a row of `values`."""
        return self._side.sites[int(self._side.values.site[row])]

    def module(self, place: int) -> ModuleName | None:
        """Returns the module of a place; None outside of modules."""
        return self._side.names[place] if place >= 0 else None

    def place_of_value(self, row: int) -> ModuleName | None:
        """Returns the module of a row of `values`."""
        return self.module(int(self._side.values.place[row]))

    def op(self, row: int) -> str:
        """Returns the name of an op."""
        return self._side.ops.names[int(self._side.ops.name[row])]

    def place_of_op(self, row: int) -> ModuleName | None:
        """Returns the module in which an op ran."""
        call = int(self._side.ops.call[row])
        return self.module(int(self._side.calls.place[call])) if call >= 0 else None

    def identify_op(self, row: int) -> tuple[str, int, int | None]:
        """Returns the name of an op, which of its name within its call it is, and which call of its module that is."""
        call = int(self._side.ops.call[row])
        of_module = None if call < 0 else int(self._side.calls.nth[call])
        return self.op(row), int(self._side.ops.nth[row]), None if of_module == -1 else of_module

    def label_op(self, row: int) -> str:
        """Returns an op with its module: `mul in blocks.0.attn`."""
        return f"{forms_of_op(self.op(row))[-1]} {in_place(self.place_of_op(row))}"

    def label_call(self, row: int) -> str:
        """Returns the module of a call, and its phase if that is not forward."""
        phase = PHASES[int(self._side.calls.calls.phase[row])]
        name = label(self.module(int(self._side.calls.place[row]))) or "optimizer step"
        return name if phase in ("forward", "optimizer") else f"{name}, {phase}"

    def label_value(self, row: int) -> str:
        """Returns a measured tensor with its module: `output of blocks.0`."""
        site, place = self.site(row), self.place_of_value(row)
        if site["op"] is not None:
            return f"{forms_of_op(site['op'])[-1]} {in_place(place)}"
        home = self.module(int(self._side.values.home[row]))
        if home is not None and site["role"].startswith(("parameter", "buffer", "update", "optimizer_state")):
            return f"{BY_NAME[site['role']].of_one} {join(home.path, site['slot'])}"
        where = f"of {label(place)}" if label(place) else "outside of modules"
        return f"{BY_NAME[site['role']].of_one}{site['slot']} {where}"


def label(place: ModuleName | None) -> str:
    """Returns the path of a module, of a root its name; "" outside of modules."""
    return "" if place is None else place.path or place.root


def in_place(place: ModuleName | None) -> str:
    """Returns `in PATH`, or where an op is that is in no module."""
    return f"in {label(place)}" if place is not None else "outside of modules"


def list_unmatched(side: RunTables, unpaired: Unpaired, misfits: Rows) -> OneSided:
    """Returns what only this recording has, by name.

    Args:
        side: the recording.
        unpaired: what has no partner.
        misfits: rows of `values` whose partners have another number of elements.
    """
    names, is_plain = Names(side), np.append(side.ops.is_plain, False)
    calls, ops, values = (_harmful(each) for each in (unpaired.calls, unpaired.ops, unpaired.values))
    of_plain = is_plain[np.where(side.values.op[values[0]] >= 0, side.values.op[values[0]], -1)]
    kept_ops, kept_values = ~is_plain[ops[0]], ~of_plain
    tensors = [*_count(values[0][kept_values], values[1][kept_values], names.label_value, _value_keys(side))]
    misfits = misfits[~is_plain[side.values.op[misfits]]]
    reason = np.full(len(misfits), len(REASONS))
    tensors += _count(misfits, reason, names.label_value, _value_keys(side))
    place = side.calls.place.astype(np.int64)
    call_keys = place << 20 | side.calls.calls.phase.astype(np.int64) & 7
    op_keys = np.append(place, -1)[side.ops.call] << 20 | side.ops.name.astype(np.int64)
    told = len(calls[0]) + int(kept_ops.sum()) + int(kept_values.sum())
    return OneSided(
        modules=tuple(f"{label(each)} ({each.type})" for each in unpaired.modules),
        calls=tuple(_count(*calls, names.label_call, call_keys)),
        ops=tuple(_count(ops[0][kept_ops], ops[1][kept_ops], names.label_op, op_keys)),
        tensors=tuple(tensors),
        harmless=len(unpaired.calls) + len(unpaired.ops) + len(unpaired.values) - told,
    )


def _harmful(unpaired: UnpairedRows) -> tuple[Rows, Column]:
    is_harmless = np.array([reason in HARMLESS for reason in REASONS])
    kept = ~is_harmless[unpaired.reason]
    return unpaired.rows[kept], unpaired.reason[kept].astype(np.int64)


def _value_keys(side: RunTables) -> Rows:
    return side.values.place.astype(np.int64) << 32 | side.values.site.astype(np.int64)


def _count(rows: Rows, reason: Column, name: Callable[[int], str], keys: Rows) -> Iterator[Named]:
    """Yields the names of rows, with how many have each, in their order."""
    _, first, which = np.unique(keys[rows] << 4 | reason, return_index=True, return_inverse=True)
    counts = np.bincount(which.reshape(-1), minlength=len(first))
    named: dict[tuple[str, str], int] = {}
    for at in np.argsort(first).tolist():
        why = SHAPE if reason[first[at]] == len(REASONS) else REASONS[int(reason[first[at]])]
        key = name(int(rows[first[at]])), why
        named[key] = named.get(key, 0) + int(counts[at])
        if len(named) == _LISTED:
            break
    yield from (Named(name=text, count=count, why=why) for (text, why), count in named.items())
    rest = len(rows) - sum(named.values())
    if rest:
        yield Named(name="others", count=rest, why="")


#: So many modules without a partner are named, with those whose names are near.
_NAMED = 5


def explain_nothing(a: RunTables, b: RunTables, alignment: Alignment) -> str:
    """Returns why no tensor of one recording is one of the other, and which names are near each other."""
    if not len(alignment.steps):
        steps = [np.unique(side.values.step).tolist() for side in (a, b)]
        argument = choose_phrase(python="step=(A, B)", command_line="--step A:B")
        return (
            "the two recordings have no step in common: the first has measured steps "
            f"{name_steps(steps[0])}, the second {name_steps(steps[1])}. "
            f"{argument} compares two steps of different numbers."
        )
    if alignment.modules:
        modules = count_of(len(alignment.modules), "aligned module")
        text = f"no tensor was measured in both recordings, of {modules}."
        return f"{text} Record both with the same captures, and both with ops or without."
    argument = choose_phrase(python="map=['EXPRESSION=PATH']", command_line="--map 'EXPRESSION=PATH'")
    near = _name_nearest(alignment)
    advice = f"{argument} says how modules of the first are called in the second."
    return f"the two recordings have no module in common. {near} {advice}"


def _name_nearest(alignment: Alignment) -> str:
    here = list(dict.fromkeys(each.path or each.root for each in alignment.missing.modules))
    there = list(dict.fromkeys(each.path or each.root for each in alignment.extra.modules))
    if not here or not there:
        return "One of them has no modules that were called."
    pairs = [(name, get_close_matches(name, there, 1, 0.0)) for name in here[:200]]
    near = [f"{name} ~ {found[0]}" for name, found in pairs if found][:_NAMED]
    return f"The nearest names are: {', '.join(near)}."
