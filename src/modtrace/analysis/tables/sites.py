"""Reads the sites of a recording: the module, the role and the slot of each measured tensor."""

from collections.abc import Iterator, Mapping
from typing import NamedTuple

import numpy as np
import pyarrow as pa

from ...recording.module_path import join
from ...recording.protocols import RecordingData
from .columns import ArrowTable, Column, RowFinder, Rows, column_of, keep_rows, take, text_codes

_COLUMNS = ("site_id", "module_id", "role", "slot", "nth")

#: How many sites are read when one of them is first asked for; then as many as are known, so that reads stay few.
_AT_ONCE = 128


class Site(NamedTuple):
    """A row of `sites`. A site without module has `module_id` None and an empty `path`."""

    module_id: int | None
    path: str
    role: str | None
    slot: str
    nth: int | None = None

    @property
    def name(self) -> str:
        """The full path of a parameter or buffer: `head.weight`."""
        return join(self.path, self.slot)


def name_roots_of_modules(data: RecordingData) -> dict[int, str]:
    """Returns the name of each module's root by the module's id; it is empty if there is only one root."""
    modules = data.table("modules").select(["module_id", "root_id", "name", "type", "parent_id"]).to_pylist()
    roots = {row["module_id"]: row["name"] or row["type"] for row in modules if row["parent_id"] is None}
    return {row["module_id"]: roots.get(row["root_id"], "") for row in modules if len(roots) > 1}


def read_sites(data: RecordingData, wanted: Column | None = None) -> dict[int, Site]:
    """Returns the sites by their ids, in the order of the table; those with wanted ids, or all."""
    table, paths = data.table("sites").select(_COLUMNS), _read_paths(data)
    if wanted is not None:
        table = keep_rows(table, np.isin(column_of(table, "site_id"), wanted))
    return dict(_list_sites(table, paths))


class SitesOnDemand:
    """The sites of a recording, each read when it is first asked for."""

    def __init__(self, data: RecordingData) -> None:
        """Reads the ids of the sites, and the paths of the modules."""
        self._table = data.table("sites").select(_COLUMNS)
        self._find_rows = RowFinder(column_of(self._table, "site_id"))
        self._paths = _read_paths(data)
        self._known: dict[int, Site | None] = {}

    def __getitem__(self, site_id: int) -> Site:
        site = self.get(site_id)
        if site is None:
            raise KeyError(site_id)
        return site

    def get(self, site_id: int) -> Site | None:
        """Returns a site by its id; None if the recording has no such site."""
        if site_id not in self._known:
            self._read_around(site_id)
        return self._known[site_id]

    def _read_around(self, site_id: int) -> None:
        """Reads a site, and those near to it: to read one alone takes as long as to read ten."""
        [row] = self._find_rows(np.array([site_id])).tolist()
        at_once = max(_AT_ONCE, len(self._known))
        first = max(row, 0) // at_once * at_once
        rows = self._table.slice(first, at_once if row >= 0 else 0)
        main = self._find_rows(column_of(rows, "site_id")) - first
        near = zip(_list_sites(rows, self._paths), (main == np.arange(len(main))).tolist(), strict=True)
        self._known.update(site for site, is_main in near if is_main)
        self._known.setdefault(site_id, None)

    def find_slots(self, site_id: Column) -> tuple[Rows, tuple[str, ...]]:
        """Returns the slots of sites as codes, and the slots that the codes stand for; -1 where there is none."""
        codes, slots = text_codes(self._table["slot"])
        return take(codes, self._find_rows(site_id)), slots


def _read_paths(data: RecordingData) -> dict[int, str]:
    modules = data.table("modules")
    return dict(zip(modules["module_id"].to_pylist(), modules["path"].to_pylist(), strict=True))


def _list_sites(table: ArrowTable, paths: Mapping[int, str]) -> Iterator[tuple[int, Site]]:
    """Yields the id of each row, and the site. Texts are read as codes, a tenth of the time that Arrow's take."""
    ids, modules, nths = (column_of(table, name).tolist() for name in ("site_id", "module_id", "nth"))
    of_roles, of_slots = (_decode(table[name]) for name in ("role", "slot"))
    for site_id, module_id, nth, role, slot in zip(ids, modules, nths, of_roles, of_slots, strict=True):
        path = paths.get(module_id) or ""
        owner = module_id if module_id >= 0 else None
        yield site_id, Site(owner, path, role, slot or "", nth if nth >= 0 else None)


def _decode(column: pa.ChunkedArray) -> list[str | None]:
    codes, texts = text_codes(column)
    known = [*texts, None]
    return [known[code] for code in codes.tolist()]
