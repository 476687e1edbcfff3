"""Selects rows of `values` by path, role, slot, phase, call and step, and names their sites."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from numbers import Integral
from typing import Any, NamedTuple

import numpy as np

from ...errors import NothingRecordedError
from ...recording.arrow.arrays import from_numpy
from ...recording.module_path import join
from ...recording.options.path_filter import PathFilter, describe_unmatched, to_path_filter, unmatched
from ...recording.options.schedule import to_schedule
from ...recording.phase import BACKWARD, FORWARD, OPTIMIZER, PHASES, RECOMPUTE
from ...recording.protocols import RecordingData
from ...recording.role import GRAD_INPUT, GRAD_OUTPUT, INPUT, LOSS, OP_OUTPUT, OUTPUT, ROLES
from ..tables.calls import read_all_calls
from ..tables.columns import (
    ArrowTable,
    Bools,
    Column,
    Rows,
    column_of,
    dictionary_codes,
    keep_rows,
    number_keys,
)
from ..tables.missing_rows import explain_none, require_rows, say_missing
from ..tables.placement import NOWHERE, Placer
from ..tables.values import PlacedValues

#: Roles whose slot is a position in the arguments or the output of a call. Other sites are named by their slot.
_OF_CALLS = frozenset({INPUT, OUTPUT, GRAD_OUTPUT, GRAD_INPUT, OP_OUTPUT})

#: If a site was measured in several phases, the first of these is selected: a recompute adds nothing new, and a
#: parameter's gradient is then the one that the optimizer used, not the contribution of each backward.
_PREFERRED = (OPTIMIZER, FORWARD, BACKWARD, RECOMPUTE)

_SHOWN = 8


class Owner(NamedTuple):
    """The owner of a site: the name of its root, its path (None outside of modules), and its slot."""

    root: str | None
    path: str | None
    slot: str


@dataclass(frozen=True, kw_only=True)
class SelectedValues:
    """Selected rows of `values`, each with its site.

    Sites are in layer order, even for gradients: the order in which the forward first calls their modules, outer
    modules before inner ones. A measurement that a wrapper shares with the wrapped module occurs once.
    """

    source: ArrowTable  # the table of which `rows` are selected
    rows: Rows
    site: Rows  # indices of `names`
    names: tuple[str, ...]
    primary: tuple[bool, ...]  # for each site, whether it is the first or only slot of its module
    owners: tuple[Owner, ...]  # the owner of each site

    def select(self, *columns: str) -> ArrowTable:
        """Returns some columns of the rows, which are read anew each time; without names, all columns."""
        return (self.source.select(columns) if columns else self.source).take(from_numpy(self.rows))

    def filter(self, kept: Bools) -> "SelectedValues":
        """Returns a selection of the rows, with all names."""
        return replace(self, rows=self.rows[kept], site=self.site[kept])


@dataclass(frozen=True)
class Selection:
    """The criteria that select rows; see `Recording.history`."""

    path: Any = None
    role: str = OUTPUT
    slot: str | None = None
    phase: str | None = None
    call: int | None = None
    steps: Any = None
    kept: bool = False  # whether only rows with a whole tensor are selected
    counters: bool = True  # False leaves out optimizer states with a single element


class _Site(NamedTuple):
    """The key of a site, which is the same in all calls of a module."""

    place: int
    owner: Owner
    op: str | None
    op_nth: int


def select_values(
    data: RecordingData, selection: Selection, places: "Places | None" = None
) -> SelectedValues:
    """Returns the selected rows.

    Args:
        data: the recording.
        selection: the criteria.
        places: the places of the recording's calls, if they were read before.

    Raises:
        TypeError: the path or the steps have a wrong type.
        ValueError: no rows are selected, or there is no such role or phase.
    """
    paths = to_path_filter(selection.path, argument="path")
    if selection.role not in ROLES:
        raise ValueError(f"role={selection.role!r}: give one of {', '.join(ROLES)}")
    if selection.phase is not None and selection.phase not in PHASES:
        raise ValueError(f"phase={selection.phase!r}: give one of {', '.join(PHASES)}, or None")
    source, of_role = _find_role(data, selection)
    values = PlacedValues(data=data, table=keep_rows(source.select(_PLACING), of_role))
    places = places or Places(data)
    site_of_row, distinct = _find_sites(values, places)
    kept = _match(paths, distinct, selection)[site_of_row]
    kept &= _narrow(kept, values, selection)
    if not selection.counters:
        kept &= _is_no_counter(kept, values)
    rows = np.flatnonzero(kept)
    rows = rows[_is_preferred(values, rows, site_of_row[rows])]
    rows = _take_once(values, rows, site_of_row[rows])
    shown, site = _order_sites(site_of_row[rows], distinct, places, selection.role)
    has_roots = len({one.owner.root for one in shown if one.place != NOWHERE}) > 1
    first: dict[tuple[Any, ...], _Site] = {}
    for one in shown:
        first.setdefault((one.place, one.op, one.op_nth), one)
    is_of_calls = selection.role in _OF_CALLS
    return SelectedValues(
        source=source,
        rows=np.flatnonzero(of_role)[rows],
        site=site,
        names=tuple(_name(one, selection.role, has_roots) for one in shown),
        primary=tuple(not is_of_calls or first[one.place, one.op, one.op_nth] == one for one in shown),
        owners=tuple(one.owner for one in shown),
    )


#: The columns that say where rows belong.
_PLACING = ("step", "phase", "site_id", "call_id", "op_id", "order", "numel")


def _find_role(data: RecordingData, selection: Selection) -> tuple[ArrowTable, Bools]:
    """Returns the table to select from, and which of its rows have the selected role."""
    table = kept_values(data) if selection.kept else data.table("values")
    require_rows(data, "values")
    values = PlacedValues(data=data, table=table)
    is_selected = values.is_of(selection.role)
    if not is_selected.any():
        roles = sorted(values.roles[code] for code in np.unique(values.role).tolist() if code >= 0)
        raise NothingRecordedError(_describe_no_role(selection, roles) + say_missing(data.meta.marks))
    return table, is_selected


def kept_values(data: RecordingData) -> ArrowTable:
    """Returns the rows of `values` that have a whole tensor.

    Raises:
        NothingRecordedError: there are none.
    """
    values = data.table("values")
    kept: ArrowTable = values.filter(values["blob"].is_valid())
    if not kept.num_rows:
        raise NothingRecordedError(explain_none(data, "whole tensors"))
    return kept


def _describe_no_role(selection: Selection, roles: Sequence[str]) -> str:
    what = "kept whole" if selection.kept else "measured"
    more, option = (", tensors=True", " tensors") if selection.kept else ("", "")
    capture = f"values=modtrace.Capture(roles={selection.role!r}{more})"
    return (
        f"role={selection.role!r} was not {what}; {what} were: {', '.join(roles)}. "
        f"Record with {capture} (modtrace record --capture 'roles={selection.role}{option}')."
    )


class Places:
    """The places of the recording's calls in the module tree."""

    def __init__(self, data: RecordingData) -> None:
        self._placer = placer = Placer(data)
        self._calls = calls = read_all_calls(data.table("calls"), placer)
        self._names = placer.name_modules()
        self._started = np.full(len(self._names), np.inf)  # the time of each place's first forward call
        rows = np.flatnonzero((calls.phase == PHASES.index(FORWARD)) & (calls.place != NOWHERE))
        np.minimum.at(self._started, calls.place[rows], calls.start_ns[rows].astype(np.float64))

    def find(self, values: PlacedValues) -> Rows:
        """Returns the index of each row's place, as `PlacedValues.find_places` does."""
        found = values.find_places(self._calls)
        added = len(self._placer.places) - len(self._names)
        if added:  # modules that the recording does not describe
            self._names = self._placer.name_modules()
            self._started = np.append(self._started, np.full(added, np.inf))
        return found

    def find_owner(self, place: int, slot: str) -> Owner:
        if place == NOWHERE:
            return Owner(None, None, slot)
        root, path, _ = self._names[place]
        return Owner(root, path, slot)

    def rank(self, place: int) -> tuple[float, int]:
        """Returns a sort key by the first forward call; modules that were never called come last in their own order."""
        return (float(self._started[place]), place) if place != NOWHERE else (np.inf, len(self._names))


def _find_sites(values: PlacedValues, places: Places) -> tuple[Rows, list[_Site]]:
    """Returns the index of each row's site, and the sites."""
    sites = values.data.table("sites")
    op, ops = dictionary_codes(sites["op"])
    op_nth = values.at_sites(column_of(sites, "op_nth"))
    place = places.find(values)
    columns = (place, values.slot, values.at_sites(op), op_nth)
    order = np.lexsort((place, values.site))
    keys, _ = number_keys(*((column[order], column[:0]) for column in columns))
    _, first, which = np.unique(keys, return_index=True, return_inverse=True)
    rows = np.sort(first)  # the sites are in the order in which the table has them
    code = np.empty(len(order), np.int64)
    code[order] = np.searchsorted(rows, first)[which]
    described = zip(*(column[order[rows]].tolist() for column in columns), strict=True)
    distinct = [
        _Site(place, places.find_owner(place, values.slots[slot]), (*ops, None)[op], nth)
        for place, slot, op, nth in described
    ]
    return code, distinct


def _match(paths: PathFilter, distinct: Sequence[_Site], selection: Selection) -> Bools:
    """Returns for each site whether the paths and the selection include it."""
    names = [_paths_of(site, selection.role) for site in distinct]
    known = dict.fromkeys(path for of_site in names for path in of_site)
    missing = [pattern._replace(argument="path") for pattern in unmatched(paths, known)]
    if missing:
        what = "module" if selection.role in _OF_CALLS else "module or parameter"
        role = f"with role={selection.role!r}"
        what += f" of which a whole tensor {role} was kept" if selection.kept else f" {role}"
        description = describe_unmatched(missing, known, what=what)
        raise ValueError(f"{description}. Give a path or a glob such as '**.attn'.")
    return np.array([paths.selects(*of_site) for of_site in names], bool)


def _paths_of(site: _Site, role: str) -> list[str]:
    """Returns the paths that a pattern can match: of the module, of the parameter, and of `weight.exp_avg`."""
    path = site.owner.path or ""
    if role in _OF_CALLS or role == LOSS:
        return [path]
    parts = site.owner.slot.split(".")
    own = [join(path, ".".join(parts[: count + 1])) for count in range(len(parts))]
    return [path, *own] if site.place != NOWHERE else own


def _narrow(kept: Bools, values: PlacedValues, selection: Selection) -> Bools:
    """Returns which rows also have the selected slot, call, phase and steps."""
    columns: tuple[tuple[str, Any, Callable[[], Column]], ...] = (
        ("slot", selection.slot, lambda: np.array(values.slots, object)[values.slot]),
        ("call", selection.call, lambda: values.nth),
        ("phase", selection.phase, lambda: np.array([*PHASES, None], object)[values.phase]),
    )
    for argument, chosen, read in columns:
        if chosen is not None:
            column = read()
            narrowed = kept & (column == chosen)
            if not narrowed.any():
                raise ValueError(
                    f"{argument}={chosen!r}: no such row with role={selection.role!r} at path={selection.path!r}; "
                    f"there are: {_list(column[kept].tolist())}"
                )
            kept = narrowed
    return kept & in_steps(values.step, kept, selection)


def _is_no_counter(kept: Bools, values: PlacedValues) -> Bools:
    """Returns which rows are of an optimizer state that is not a counter.

    A state is a counter if it has a single element for each parameter, unless all states do.
    """
    states = [state_of(slot) for slot in values.slots]
    is_larger = kept & (column_of(values.table, "numel") > 1)
    larger = {states[code] for code in np.unique(values.slot[is_larger]).tolist()}
    return np.array([not larger or state in larger for state in states], np.bool_)[values.slot]


def state_of(name: str) -> str:
    """Returns the optimizer's name of a state: `exp_avg` for `fc.weight.exp_avg`."""
    return name.rpartition(".")[2]


def in_steps(steps: Rows, of: Bools, selection: Selection) -> Bools:
    """Returns which rows are of the selected steps.

    Raises:
        ValueError: no row in `of` is of a selected step.
    """
    wanted = selection.steps
    if wanted is None:
        return np.ones(len(steps), bool)
    is_one = isinstance(wanted, Integral)
    schedule = to_schedule([int(wanted)] if is_one else wanted)
    chosen = np.isin(steps, [step for step in np.unique(steps).tolist() if step in schedule])
    if not (of & chosen).any():
        raise ValueError(
            f"{'step' if is_one else 'steps'}={wanted!r}: "
            f"nothing was {'kept' if selection.kept else 'measured'} there; "
            f"there are: {_list(steps[of].tolist())}"
        )
    return chosen


def _list(values: Iterable[Any]) -> str:
    shown = [repr(value) for value in sorted(set(values), key=lambda value: (value is None, value))]
    if len(shown) > _SHOWN:
        shown = [*shown[: _SHOWN - 1], "…", shown[-1]]
    return ", ".join(shown)


def _is_preferred(values: PlacedValues, rows: Rows, site: Rows) -> Bools:
    """Returns which rows have their site's preferred phase and belong to a call or an optimizer, not an op."""
    ranks = np.array([_PREFERRED.index(phase) for phase in PHASES] + [len(PHASES)])
    rank = ranks[values.phase[rows]] + (len(ranks) + 1) * (column_of(values.table, "op_id")[rows] >= 0)
    best = np.full(int(site.max(initial=-1)) + 1, np.iinfo(np.int64).max)
    np.minimum.at(best, site, rank)
    return np.asarray(rank == best[site])


def _take_once(values: PlacedValues, rows: Rows, site: Rows) -> Rows:
    """Returns the rows, without rows of wrappers that only passed on the wrapped module's output."""
    columns = (values.moment[rows], site, values.step[rows])
    order = np.lexsort(columns)  # a stable sort leaves the first of equal rows in front
    first = np.ones(len(rows), bool)
    first[1:] = np.any([np.diff(column[order]) != 0 for column in columns], axis=0)
    return rows[np.sort(order[first])]


def _order_sites(
    site_of_row: Rows, distinct: Sequence[_Site], places: Places, role: str
) -> tuple[list[_Site], Rows]:
    """Returns the remaining sites in layer order, and for each row the index of its site."""

    def rank(code: int) -> tuple[Any, ...]:
        by_slot = _natural(distinct[code].owner.slot) if role in _OF_CALLS and role != OP_OUTPUT else []
        return (*places.rank(distinct[code].place), by_slot, code)

    order = sorted(np.unique(site_of_row).tolist(), key=rank)
    index = np.full(len(distinct), -1, np.int64)
    index[order] = np.arange(len(order))
    return [distinct[code] for code in order], index[site_of_row]


def _natural(text: str) -> list[tuple[int, str]]:
    """Returns a sort key that puts `[2]` before `[10]`."""
    parts = "".join(char if char.isdigit() else f" {char} " for char in text).split()
    return [(int(part), "") if part.isdecimal() else (-1, part) for part in parts]


def _name(site: _Site, role: str, has_roots: bool) -> str:
    """Returns the name of a site: `blocks.0.attn`, `blocks.0.attn[1]`, `blocks.0.attn.weight`, `GPT/head`, `loss`."""
    if role == LOSS:
        return role + site.owner.slot
    path, root = site.owner.path or "", site.owner.root or ""
    if role not in _OF_CALLS:
        name = join(path, site.owner.slot)
    else:
        name = path or root
        if site.op is not None:
            name += f"/{site.op}" + (f"@{site.op_nth}" if site.op_nth > 0 else "")
        name += site.owner.slot
    return f"{root}/{name}" if has_roots and name != root else name
