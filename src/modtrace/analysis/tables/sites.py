"""Reads the sites of a recording: the module, the role and the slot of each measured tensor."""

from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np

from ...recording.module_path import join
from ...recording.protocols import RecordingData
from .columns import Column, RowFinder, Rows, column_of, keep_rows, take, text_codes

_COLUMNS = ("site_id", "module_id", "role", "slot", "nth")

#: How many sites are read when one of them is first asked for.
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
    return {row["site_id"]: _to_site(row, paths) for row in table.to_pylist()}


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
        first = max(row, 0) // _AT_ONCE * _AT_ONCE
        rows = self._table.slice(first, _AT_ONCE if row >= 0 else 0).to_pylist()
        main = self._find_rows(np.array([near["site_id"] for near in rows], np.int64)).tolist()
        near = (one for number, one in enumerate(rows, first) if main[number - first] == number)
        self._known.update((one["site_id"], _to_site(one, self._paths)) for one in near)
        self._known.setdefault(site_id, None)

    def find_slots(self, site_id: Column) -> tuple[Rows, tuple[str, ...]]:
        """Returns the slots of sites as codes, and the slots that the codes stand for; -1 where there is none."""
        codes, slots = text_codes(self._table["slot"])
        return take(codes, self._find_rows(site_id)), slots


def _read_paths(data: RecordingData) -> dict[int, str]:
    modules = data.table("modules")
    return dict(zip(modules["module_id"].to_pylist(), modules["path"].to_pylist(), strict=True))


def _to_site(row: Mapping[str, Any], paths: Mapping[int, str]) -> Site:
    path = paths.get(row["module_id"]) or ""
    return Site(row["module_id"], path, row["role"], row["slot"] or "", row["nth"])
