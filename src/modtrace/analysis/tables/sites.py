"""Reads the sites of a recording: the module, the role and the slot of each measured tensor."""

from typing import NamedTuple

import numpy as np

from ...recording.module_path import join
from ...recording.protocols import RecordingData
from .columns import Column, column_of, keep_rows


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
    modules = data.table("modules").select(["module_id", "path"]).to_pylist()
    paths = {row["module_id"]: row["path"] for row in modules}
    table = data.table("sites").select(["site_id", "module_id", "role", "slot", "nth"])
    if wanted is not None:
        table = keep_rows(table, np.isin(column_of(table, "site_id"), wanted))
    rows = table.to_pylist()
    return {
        row["site_id"]: Site(
            row["module_id"], paths.get(row["module_id"]) or "", row["role"], row["slot"] or "", row["nth"]
        )
        for row in rows
    }
