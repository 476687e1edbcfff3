"""Names compared tensors and rows that only one recording has, and explains why nothing could be compared."""

from collections.abc import Callable, Iterator
from difflib import get_close_matches
from typing import Any

import numpy as np

from ...recording.module_path import join
from ...recording.phase import FORWARD, OPTIMIZER, PHASES
from ...recording.role import BY_NAME
from ...recording.suggestions import count_of
from ..alignment.contract import HARMLESS, REASONS, Alignment, Unpaired, UnpairedRows
from ..graph.parts import forms_of_op
from ..tables.chosen_step import find_step_kinds, name_steps
from ..tables.columns import Bools, Column, Rows
from ..tables.placement import ModuleName
from ..tables.run import RunTables
from .answer import Named, OneSided

#: The largest number of names that are listed of one kind; the last entry sums up all others.
_LISTED = 1000

#: A reason besides `REASONS` of the alignment: the tensor of the other recording has another number of elements.
_REASONS = (*REASONS, "shape")


class Names:
    """Names rows of one recording."""

    def __init__(self, tables: RunTables) -> None:
        self._tables = tables

    def site(self, row: int) -> dict[str, Any]:
        """Returns the row of `sites` that belongs to a row of `values`."""
        return self._tables.sites[int(self._tables.values.site[row])]

    def place_of_value(self, row: int) -> ModuleName | None:
        """Returns the module of a row of `values`; None outside of modules."""
        return self._module(int(self._tables.values.place[row]))

    def place_of_op(self, row: int) -> ModuleName | None:
        """Returns the module in which an op ran; None outside of modules."""
        call = int(self._tables.ops.call[row])
        return self._module(int(self._tables.calls.place[call])) if call >= 0 else None

    def identify_op(self, row: int) -> tuple[str, int, int | None]:
        """Returns an op's name, its number among those of its name in the call, and the number of the module's call."""
        ops, call = self._tables.ops, int(self._tables.ops.call[row])
        nth = None if call < 0 else int(self._tables.calls.nth[call])
        return ops.names[ops.name[row]], int(ops.nth[row]), None if nth == -1 else nth

    def short_op(self, row: int) -> str:
        """Returns the name of an op without namespace and overload: `mul`."""
        return forms_of_op(self._tables.ops.names[self._tables.ops.name[row]])[-1]

    def label_op(self, row: int) -> str:
        """Returns the name of an op with its module: `mul in blocks.0.attn`."""
        return f"{self.short_op(row)} {_in_module(self.place_of_op(row))}"

    def label_call(self, row: int) -> str:
        """Returns the name of a call's module, with its phase if that is not forward."""
        phase = PHASES[int(self._tables.calls.phase[row])]
        name = label(self._module(int(self._tables.calls.place[row]))) or "optimizer step"
        return name if phase in (FORWARD, OPTIMIZER) else f"{name}, {phase}"

    def label_value(self, row: int) -> str:
        """Returns the name of a measured tensor with its module: `output of blocks.0`."""
        site, place = self.site(row), self.place_of_value(row)
        if site["op"] is not None:
            return f"{forms_of_op(site['op'])[-1]} {_in_module(place)}"
        role = BY_NAME[site["role"]].of_one
        home = self._module(int(self._tables.values.home[row]))
        if home is not None and site["role"].startswith(("parameter", "buffer", "update", "optimizer_state")):
            return f"{role} {join(home.path, site['slot'])}"
        return f"{role}{site['slot']} {f'of {label(place)}' if label(place) else 'outside of modules'}"

    def _module(self, place: int) -> ModuleName | None:
        return self._tables.names[place] if place >= 0 else None


def label(place: ModuleName | None) -> str:
    """Returns the path of a module, or a root's name; "" outside of modules."""
    return "" if place is None else place.path or place.root


def _in_module(place: ModuleName | None) -> str:
    return f"in {label(place)}" if place is not None else "outside of modules"


def list_unmatched(tables: RunTables, unpaired: Unpaired, resized: Rows, *, other_mesh: bool) -> OneSided:
    """Returns the names and counts of rows that only this recording has.

    Args:
        tables: the tables of the recording.
        unpaired: its rows without partner.
        resized: its rows of `values` whose partners have another number of elements.
        other_mesh: as in `ComparableRuns`; ops that only one recording has are harmless then.
    """
    names, is_plain, op_of_value = (
        Names(tables),
        np.append(tables.adds_nothing | other_mesh, False),
        tables.values.op,
    )
    calls, call_reason = choose_harmful(unpaired.calls, np.zeros(len(unpaired.calls), bool))
    ops, op_reason = choose_harmful(unpaired.ops, is_plain[unpaired.ops.rows])
    values, value_reason = choose_harmful(unpaired.values, is_plain[op_of_value[unpaired.values.rows]])
    resized = resized[~is_plain[op_of_value[resized]]]
    shape_reason = np.full(len(resized), len(REASONS))
    place = tables.calls.place.astype(np.int64)
    call_keys = place << 20 | tables.calls.phase.astype(np.int64) & 7
    op_keys = np.append(place, -1)[tables.ops.call] << 20 | tables.ops.name.astype(np.int64)
    value_keys = tables.values.place.astype(np.int64) << 32 | tables.values.site.astype(np.int64)
    is_unpaired_step = call_reason == REASONS.index("step"), value_reason == REASONS.index("step")
    steps = np.union1d(
        tables.calls.step[calls[is_unpaired_step[0]]], tables.values.step[values[is_unpaired_step[1]]]
    )
    return OneSided(
        steps=tuple(steps.tolist()),
        modules=tuple(f"{label(module)} ({module.type})" for module in unpaired.modules),
        calls=tuple(_count(calls, call_reason, names.label_call, call_keys)),
        ops=tuple(_count(ops, op_reason, names.label_op, op_keys)),
        tensors=(
            *_count(values, value_reason, names.label_value, value_keys),
            *_count(resized, shape_reason, names.label_value, value_keys),
        ),
        harmless=sum(map(len, (unpaired.calls, unpaired.ops, unpaired.values)))
        - sum(map(len, (calls, ops, values))),
    )


def choose_harmful(unpaired: UnpairedRows, is_plain: Bools) -> tuple[Rows, Column]:
    """Returns the rows that show a difference between what the models compute, with their reasons."""
    is_harmless = np.array([reason in HARMLESS for reason in REASONS])
    kept = ~is_harmless[unpaired.reason] & ~is_plain
    return unpaired.rows[kept], unpaired.reason[kept].astype(np.int64)


def _count(rows: Rows, reason: Column, name: Callable[[int], str], keys: Rows) -> Iterator[Named]:
    """Yields the names of rows in their order, each with the number of rows that have it."""
    _, first, which = np.unique(keys[rows] << 4 | reason, return_index=True, return_inverse=True)
    counts = np.bincount(which.reshape(-1), minlength=len(first))
    named: dict[tuple[str, str], int] = {}
    for number in np.argsort(first).tolist():
        key = name(int(rows[first[number]])), _REASONS[int(reason[first[number]])]
        named[key] = named.get(key, 0) + int(counts[number])
        if len(named) == _LISTED:
            break
    yield from (Named(name=text, count=count, why=why) for (text, why), count in named.items())
    rest = len(rows) - sum(named.values())
    if rest:
        yield Named(name="others", count=rest, why="")


#: The largest number of modules without partner that are named with similar names of the other recording.
_NAMED = 5


def explain_nothing(a: RunTables, b: RunTables, alignment: Alignment) -> str:
    """Returns why no tensor of one recording has a partner in the other, and which names are similar."""
    if not len(alignment.steps):
        return (
            f"the two recordings have no step in common: the first has measured {_name_steps(a)}, the second "
            f"{_name_steps(b)}. step=(A, B) (modtrace compare --step A:B) compares two steps of different numbers or "
            "kinds."
        )
    if alignment.modules:
        modules = count_of(len(alignment.modules), "aligned module")
        text = f"no tensor was measured in both recordings, of {modules}."
        return f"{text} Record both with the same captures, and both with ops or without."
    advice = "map=['EXPRESSION=PATH'] (--map 'EXPRESSION=PATH') says how modules of the first are called in the second."
    return f"the two recordings have no module in common. {_name_nearest(alignment)} {advice}"


def _name_steps(tables: RunTables) -> str:
    """Returns the steps with values by their kind: `train steps 0..9 and eval steps 10`."""
    kinds, steps = find_step_kinds(tables.data), np.unique(tables.values.step).tolist()
    of_kinds = [
        (kind, [step for step in steps if kinds.get(step) == kind])
        for kind in dict.fromkeys(map(kinds.get, steps))
    ]
    named = [f"{kind or 'unfinished'} steps {name_steps(of_kind)}" for kind, of_kind in of_kinds]
    return " and ".join(named) or "none"


def _name_nearest(alignment: Alignment) -> str:
    names, names_b = (
        list(dict.fromkeys(map(label, unpaired.modules))) for unpaired in (alignment.missing, alignment.extra)
    )
    if not names or not names_b:
        return "One of them has no modules that were called."
    pairs = [(name, get_close_matches(name, names_b, 1, 0.0)) for name in names[:200]]
    near = [f"{name} ~ {matches[0]}" for name, matches in pairs if matches][:_NAMED]
    return f"The nearest names are: {', '.join(near)}."
