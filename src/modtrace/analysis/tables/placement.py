"""Finds where calls stand in the tree of registered modules, and names these places."""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from typing import NamedTuple, cast
from weakref import WeakKeyDictionary

import numpy as np

from ...recording.module_path import is_below, join, path_below
from ...recording.protocols import RecordingData
from .columns import ArrowTable, Column, Rows, find_rows, take

NO_MODULE = -1
NOWHERE = -1

#: The place of an op that ran outside of the module tree, in place of an index.
OUTSIDE = NOWHERE
OPTIMIZERS = -2
UNRECORDED = -3

#: The names of what has no place; `UNRECORDED` is for ops whose call is missing from the recording.
NO_PLACE_NAMES = {
    OUTSIDE: "(outside of modules)",
    OPTIMIZERS: "(optimizer)",
    UNRECORDED: "(call not recorded)",
}


class Module(NamedTuple):
    """A registered module. A wrapper and the module that it wraps count as one."""

    module_id: int
    root_id: int
    path: str
    aliases: tuple[str, ...] = ()
    name: str | None = None
    type: str = ""
    parent_id: int | None = None
    parameters: int | None = None


class TreePlace(NamedTuple):
    """A place in the module tree: a module under one of its paths."""

    module: Module
    path: str
    parent: int  # the index of the place above; NOWHERE for a root

    @property
    def is_alias(self) -> bool:
        """True if the path is not the module's own."""
        return self.path != self.module.path


def merge_wrappers(table: ArrowTable) -> dict[int, Module]:
    """Returns the modules by id. A wrapper and the wrapped module have one path, and share an entry with both names."""
    columns = {name: table[name].to_pylist() for name in (*Module._fields, "raw_path")}
    raw_paths = dict(zip(columns["module_id"], columns.pop("raw_path"), strict=True))
    columns["aliases"] = [tuple(dict.fromkeys(aliases)) for aliases in columns["aliases"]]
    columns["name"] = [name or None for name in columns["name"]]
    read = (Module(*row) for row in zip(*columns.values(), strict=True))
    by_id = {module.module_id: module for module in read}  # the last row of a module counts
    if not any(_is_wrapped(module, by_id) for module in by_id.values()):
        return by_id
    chains: dict[int, list[Module]] = defaultdict(list)
    for module_id, outermost in _find_outermost(by_id).items():
        chains[outermost].append(by_id[module_id])
    merged: dict[int, Module] = {}
    for outermost, chain in chains.items():
        chain.sort(key=lambda module: (module.module_id != outermost, len(raw_paths[module.module_id])))
        merged.update(dict.fromkeys([module.module_id for module in chain], _merge(chain)))
    return merged


def read_modules(data: RecordingData) -> dict[int, Module]:
    """Returns the modules of a recording by id; see `merge_wrappers`. A view asks for them up to eight times."""
    return _read(data).modules


class _Read:
    """What was read of the modules of a recording, and the places at which they are registered."""

    def __init__(self, table: ArrowTable) -> None:
        self.table = table
        self.modules = modules = merge_wrappers(table)
        #: The number of roots that hold modules: a loss function is none.
        self.models = len({module.root_id for module in modules.values() if module.path})

    @cached_property
    def main(self) -> dict[int, int]:
        """The place of each module, by the id that its merged entry has."""
        distinct = dict.fromkeys(module.module_id for module in self.modules.values())
        return {module_id: place for place, module_id in enumerate(distinct)}

    @cached_property
    def places(self) -> list[TreePlace]:
        """The places at which the modules are registered."""
        distinct = {module.module_id: module for module in self.modules.values()}
        above = (_find_parent(module, self.modules) for module in distinct.values())
        return [
            TreePlace(module, module.path, NOWHERE if parent is None else self.main[parent.module_id])
            for module, parent in zip(distinct.values(), above, strict=True)
        ]

    def place_registered(self, modules: Column, parents: Rows) -> Rows:
        """Returns the places of modules that are called in what they are registered in; NOWHERE for others."""
        ids, main, around = self._registered
        at = find_rows(ids, modules)
        places = take(main, at)
        waiting = np.flatnonzero((at >= 0) & (parents != NOWHERE))
        above = around[places[waiting]]
        found = np.where(parents == NOWHERE, places, NOWHERE)
        while len(waiting):
            is_found = above == parents[waiting]
            found[waiting[is_found]] = places[waiting[is_found]]
            waiting, above = (column[~is_found & (above != NOWHERE)] for column in (waiting, above))
            above = around[above]
        return found

    @cached_property
    def _registered(self) -> tuple[Column, Rows, Rows]:
        """The ids of all modules, their places, and for each place the one around it that has the start of its path."""
        main = [self.main[module.module_id] for module in self.modules.values()]
        around = [
            parent if parent != NOWHERE and self._is_inside(module, self.places[parent].module) else NOWHERE
            for module, _, parent in self.places
        ]
        return np.array([*self.modules], np.int64), np.array(main, np.int64), np.array(around, np.int64)

    @staticmethod
    def _is_inside(module: Module, other: Module) -> bool:
        return (
            module.root_id == other.root_id
            and module.path != other.path
            and is_below(module.path, other.path)
        )


def _read(data: RecordingData) -> _Read:
    table = data.table("modules")
    known = _modules_read.get(data)
    if known is None or known.table is not table:
        known = _modules_read[data] = _Read(table)
    return known


def name_module(data: RecordingData, module: Module) -> str:
    """Returns the name of a module in a sentence."""
    root = read_modules(data).get(module.root_id, module)
    return name_in_text(data, root.name or root.type, module.path)


def name_in_text(data: RecordingData, root: str, path: str) -> str:
    """Returns the name in a sentence of a module, or of a parameter by its full path: `head.weight`; of a root its own.

    The root's name is in front where the path alone would not do: it begins with a number (`Sequential/0`), or models
    are several.
    """
    [name] = name_all_in_text(data, [(root, path)])
    return name


def name_all_in_text(data: RecordingData, names: Iterable[tuple[str, str]]) -> Iterator[str]:
    """Yields for each root's name with a path what `name_in_text` returns, which asks for the modules each time."""
    several = _read(data).models > 1
    for root, path in names:
        yield (f"{root}/{path}" if several or path[0].isdigit() else path) if path else root


#: What was read of the modules of each recording.
_modules_read: WeakKeyDictionary[RecordingData, _Read] = WeakKeyDictionary()


def _find_outermost(by_id: Mapping[int, Module]) -> dict[int, int]:
    """Returns the id of the outermost wrapper of each module; a module without wrapper is its own."""
    outermost: dict[int, int] = {}
    for module_id, module in by_id.items():
        if not _is_wrapped(module, by_id):  # as most modules
            outermost[module_id] = module_id
            continue
        chain: dict[int, None] = {}
        while module_id not in outermost and module_id not in chain and _is_wrapped(by_id[module_id], by_id):
            chain[module_id] = None
            module_id = cast(int, by_id[module_id].parent_id)
        found = outermost.get(module_id, module_id)
        outermost.update(dict.fromkeys([*chain, module_id], found))
    return outermost


def _find_parent(module: Module, by_id: Mapping[int, Module]) -> Module | None:
    return None if module.parent_id is None else by_id.get(module.parent_id)


def _is_wrapped(module: Module, by_id: Mapping[int, Module]) -> bool:
    parent = _find_parent(module, by_id)
    return parent is not None and parent.path == module.path and parent.root_id == module.root_id


def _merge(chain: Sequence[Module]) -> Module:
    """Merges a wrapper, the module that it wraps, and so on into one module."""
    types = [module.type for module in chain]
    return chain[0]._replace(
        aliases=tuple(dict.fromkeys(alias for module in chain for alias in module.aliases)),
        name=next((module.name for module in chain if module.name), None),
        type="(".join(types) + ")" * (len(types) - 1),
        parameters=next((module.parameters for module in chain if module.parameters is not None), None),
    )


class ModuleName(NamedTuple):
    """The root and the path that name a module of a recording."""

    root: str  # the name of its root
    path: str  # the path below the root; "" for the root itself
    type: str


class PlaceName(NamedTuple):
    """The name of a place in the module tree, or of what is outside of it."""

    name: str  # the path; for a root, its name
    root: str | None = None  # None for what is outside of the module tree
    path: str | None = None
    type: str | None = None
    parent: int = OUTSIDE  # the index of the place above; OUTSIDE for a root

    def name_call(self, nth: int | None) -> str:
        """Returns the name of a call of this place: `path` for the first in the step, `path@1` for the second."""
        return f"{self.name}@{nth}" if nth is not None and nth > 0 else self.name


class Placer:
    """Finds the places of called modules in the module tree, and adds places for shared and unknown modules."""

    def __init__(self, data: RecordingData) -> None:
        self._read = read = _read(data)
        self.modules = read.modules
        self._main, self.places = read.main, [*read.places]
        self._known: dict[tuple[int, int], int] = {}  # the places found so far, by module and calling place
        self._shared: dict[tuple[int, str], int] = {}  # added places, by module and path

    @cached_property
    def _at(self) -> dict[tuple[int, str], int]:
        return {(place.module.root_id, place.path): index for index, place in enumerate(self.places)}

    @cached_property
    def _aliased(self) -> dict[tuple[int, str], Module]:
        return {
            (place.module.root_id, alias): place.module
            for place in self._read.places
            for alias in place.module.aliases
        }

    def place(self, module_id: int, parent: int) -> int:
        """Returns the place of a module that is called from the place `parent`, or from NOWHERE."""
        key = (module_id, parent)
        if key not in self._known:
            self._known[key] = self._find_place(module_id, parent)
        return self._known[key]

    def place_all(self, modules: Column, parents: Rows) -> Rows:
        """Returns the places of modules that are called from the places `parents`; equal pairs are looked up once."""
        keys = (modules.astype(np.int64) << 32) + parents
        # Calls of one module often follow each other, and to sort a million keys takes 60 MB.
        begins = np.flatnonzero(np.diff(keys, prepend=keys[:1] - 1))
        _, first, which = np.unique(keys[begins], return_index=True, return_inverse=True)
        first = begins[first]
        modules, parents = modules[first], parents[first]
        places = self._read.place_registered(modules, parents)
        for row in np.flatnonzero(places == NOWHERE).tolist():
            places[row] = self.place(int(modules[row]), int(parents[row]))
        return np.repeat(places[which], np.diff(begins, append=len(keys)))

    def name_modules(self) -> tuple[ModuleName, ...]:
        """Returns the module of each place."""
        roots = name_roots(self.places)
        return tuple(
            ModuleName(roots.get(place.module.root_id, ""), place.path, place.module.type)
            for place in self.places
        )

    def name_places(self) -> tuple[PlaceName, ...]:
        """Returns the name of each place."""
        return tuple(
            PlaceName(module.path or module.root, *module, place.parent)
            for module, place in zip(self.name_modules(), self.places, strict=True)
        )

    def _find_place(self, module_id: int, parent: int) -> int:
        module = self.modules.get(module_id)
        if module is None:
            return self._place_unknown(module_id, parent)
        main = self._main[module.module_id]
        if parent == NOWHERE or self.places[parent].module.root_id != module.root_id:
            return main
        path = self._path_from(self.places[parent], module)
        return main if path == module.path else self._place_at(path, module)

    def _place_unknown(self, module_id: int, parent: int) -> int:
        label = "(unknown)" if module_id == NO_MODULE else f"(unknown#{module_id})"
        above = self.places[parent] if parent != NOWHERE else None
        root_id = above.module.root_id if above else module_id
        path = join(above.path, label) if above else label
        return self._add(TreePlace(Module(module_id=module_id, root_id=root_id, path=path), path, parent))

    def _path_from(self, above: TreePlace, module: Module) -> str:
        """Returns the path at which a module stands when it is called from the place `above`."""
        if not is_below(module.path, above.module.path):
            return path_below(above.path, module.path, module.aliases)
        if not above.is_alias:
            return module.path
        return join(above.path, module.path[len(above.module.path) :].lstrip("."))

    def _place_at(self, path: str, module: Module) -> int:
        """Returns the place of a shared module at a path that is not its own, and adds it if it is new."""
        key = (module.module_id, path)
        if key not in self._shared:
            self._shared[key] = self._add(TreePlace(module, path, self._place_above(path, module.root_id)))
        return self._shared[key]

    def _place_above(self, path: str, root_id: int) -> int:
        """Returns the nearest place above a path; shared containers in between get places of their own."""
        missing = []
        while path:
            path = path.rpartition(".")[0]
            if (root_id, path) in self._at:
                break
            if (root_id, path) in self._aliased:
                missing.append(path)
        index = self._at.get((root_id, path), NOWHERE)
        for name in reversed(missing):
            module = self._aliased[root_id, name]
            index = self._shared[module.module_id, name] = self._add(TreePlace(module, name, index))
        return index

    def _add(self, place: TreePlace) -> int:
        index = len(self.places)
        self._at.setdefault((place.module.root_id, place.path), index)
        self.places.append(place)
        return index


def label_places(places: Sequence[TreePlace]) -> list[str]:
    """Returns the label of each place: its path without its parent's; for a root, its name."""
    return [_label(place, places) for place in places]


def name_roots(places: Sequence[TreePlace]) -> dict[int, str]:
    """Returns the name of each root, by its id."""
    roots = [
        place for place in places if place.module.module_id == place.module.root_id and not place.is_alias
    ]
    return {place.module.module_id: _label(place, places) for place in roots}


def _label(place: TreePlace, places: Sequence[TreePlace]) -> str:
    if place.parent == NOWHERE:
        return place.module.name or place.path or place.module.type
    above = places[place.parent]
    return place.path[len(above.path) :].lstrip(".") if is_below(place.path, above.path) else place.path
