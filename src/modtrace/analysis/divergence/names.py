"""Names the places of compared tensors, and of calls, ops and tensors that only one recording has."""

from collections import Counter
from collections.abc import Iterator
from functools import cached_property
from typing import Any

import numpy as np

from ...recording.module_path import join
from ...recording.phase import PHASES
from ..alignment.contract import HARMLESS, REASONS, ModuleName, Unpaired, UnpairedRows
from ..alignment.sides import Side
from ..graph.parts import forms_of_op
from ..step.calls import Rows
from .answer import Named, Unmatched

#: At most so many places of a kind are listed; the last one says how many more there are.
_LISTED = 1000


class Names:
    """Finds the names of rows of one recording."""

    def __init__(self, side: Side) -> None:
        self._side = side

    @cached_property
    def _sites(self) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = self._side.data.table("sites").to_pylist()
        return found

    def site(self, row: int) -> dict[str, Any]:
        """Returns the site of a row of `values`."""
        return self._sites[int(self._side.values.site[row])]

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
        if place is not None and site["role"].startswith(
            ("parameter", "buffer", "update", "optimizer_state")
        ):
            return f"{site['role']} {join(place.path, site['slot'])}"
        return f"{site['role']}{site['slot']} of {label(place) or '(outside of modules)'}"


def label(place: ModuleName | None) -> str:
    """Returns the path of a module, of a root its name; "" outside of modules."""
    return "" if place is None else place.path or place.root


def in_place(place: ModuleName | None) -> str:
    """Returns `in PATH`, or where an op is that is in no module."""
    return f"in {label(place)}" if place is not None else "(outside of modules)"


def list_unmatched(side: Side, unpaired: Unpaired) -> Unmatched:
    """Returns what only this recording has, by name."""
    names = Names(side)
    tables = (unpaired.calls, unpaired.ops, unpaired.values)
    return Unmatched(
        modules=tuple(f"{label(each)} ({each.type})" for each in unpaired.modules),
        calls=tuple(_count(unpaired.calls, names.label_call)),
        ops=tuple(_count(unpaired.ops, names.label_op)),
        tensors=tuple(_count(unpaired.values, names.label_value)),
        harmless=sum(sum(each.count().get(reason, 0) for reason in HARMLESS) for each in tables),
    )


def _count(unpaired: UnpairedRows, name: Any) -> Iterator[Named]:
    is_harmless = np.array([reason in HARMLESS for reason in REASONS])
    kept: Rows = np.flatnonzero(~is_harmless[unpaired.reason])
    counts = Counter(
        (name(int(unpaired.rows[at])), REASONS[int(unpaired.reason[at])]) for at in kept.tolist()
    )
    for (text, why), count in list(counts.items())[:_LISTED]:
        yield Named(name=text, count=count, why=why)
    rest = sum(count for _, count in list(counts.items())[_LISTED:])
    if rest:
        yield Named(name=f"{len(counts) - _LISTED} more places", count=rest, why="op")
