"""Names sites while a run goes on, from the rows of `modules` and `sites` that have been written."""

from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from ..module_path import join
from ..options.capture import Capture
from ..role import BUFFER, OF_PARAMETERS

#: Roles of parameters and buffers, which have their own paths.
_WITH_PATHS = OF_PARAMETERS | {BUFFER}


class SiteNames:
    """The sites seen so far, by id, and which of them a capture selects."""

    def __init__(self) -> None:
        self.revision = 0  # increases when the result of `select` may change
        self._modules: dict[int, Mapping[str, Any]] = {}
        self._sites: list[Mapping[str, Any]] = []

    def add_modules(self, columns: Mapping[str, pa.Array]) -> None:
        """Adds rows of `modules`. The last row of a module counts, because names may be learnt late."""
        self._modules |= {
            row["module_id"]: row for row in _rows_of(columns, "module_id", "path", "name", "type")
        }
        self.revision += 1

    def add_sites(self, columns: Mapping[str, pa.Array]) -> None:
        """Adds rows of `sites`, whose ids count up from 0."""
        self._sites += _rows_of(columns, "module_id", "nth", "role", "slot", "op", "op_nth")

    def select(self, selection: Capture, first: int = 0) -> npt.NDArray[np.bool_]:
        """Returns, for each site from `first` on, whether a capture selects it, by role and path."""
        return np.array([self._is_meant(site, selection) for site in self._sites[first:]], bool)

    def describe(self, site_id: int) -> str:
        """Returns a description of a site: `blocks.3.mlp output`, `blocks.3.mlp@1 output[0]`, `head.weight update`."""
        if not 0 <= site_id < len(self._sites):
            return f"site {site_id}"
        site = self._sites[site_id]
        role, slot = site["role"], site.get("slot") or ""
        module = self._module_of(site)
        if role in _WITH_PATHS:
            return f"{join(module.get('path') or '', slot)} {role}"
        path = module.get("path") or module.get("name") or module.get("type") or ""
        nth = f"@{site['nth']}" if site.get("nth") else ""
        op = f" {site['op']}" if site.get("op") else ""
        return f"{path}{nth}{op} {role}{slot}".lstrip()  # a loss belongs to no module

    def _is_meant(self, site: Mapping[str, Any], selection: Capture) -> bool:
        if site["role"] not in selection.roles:
            return False
        path = self._module_of(site).get("path") or ""
        if site["role"] in _WITH_PATHS:
            return selection.paths.selects(path, join(path, site.get("slot") or ""))
        return selection.paths.selects(path)

    def _module_of(self, site: Mapping[str, Any]) -> Mapping[str, Any]:
        """Returns the row of a site's module; an empty one if there is none."""
        return self._modules.get(site.get("module_id", -1), {})


def _rows_of(columns: Mapping[str, pa.Array], *wanted: str) -> list[Mapping[str, Any]]:
    """Returns the rows, with the wanted columns that exist."""
    names = [name for name in wanted if name in columns]
    rows = zip(*(columns[name].to_pylist() for name in names), strict=True)
    return [dict(zip(names, values, strict=True)) for values in rows]
