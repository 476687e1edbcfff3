"""The sites of a recording: of which module, in which role and where among its values tensors were measured."""

from typing import NamedTuple

from ...recording.module_path import join
from ...recording.protocols import RecordingData


class Site(NamedTuple):
    """One site. If it belongs to no module, `module_id` is None and `path` is empty."""

    module_id: int | None
    path: str
    role: str | None
    slot: str

    @property
    def name(self) -> str:
        """The full path of a parameter or buffer: `head.weight`."""
        return join(self.path, self.slot)


def name_roots_of_modules(data: RecordingData) -> dict[int, str]:
    """Returns the name of the root of each module, by the id of the module; nothing if there is only one root."""
    modules = data.table("modules").select(["module_id", "root_id", "name", "type", "parent_id"]).to_pylist()
    roots = {row["module_id"]: row["name"] or row["type"] for row in modules if row["parent_id"] is None}
    return {row["module_id"]: roots.get(row["root_id"], "") for row in modules if len(roots) > 1}


def read_sites(data: RecordingData) -> dict[int, Site]:
    """Returns the sites by their ids, in the order of the table."""
    modules = data.table("modules").select(["module_id", "path"]).to_pylist()
    paths = {row["module_id"]: row["path"] for row in modules}
    rows = data.table("sites").select(["site_id", "module_id", "role", "slot"]).to_pylist()
    return {
        row["site_id"]: Site(
            row["module_id"], paths.get(row["module_id"]) or "", row["role"], row["slot"] or ""
        )
        for row in rows
    }
