"""Reads which parameters a model has, whether they require gradients, and which optimizer updates them."""

from typing import NamedTuple

import numpy as np

from ...recording.module_path import join
from ...recording.protocols import RecordingData
from .columns import column_of
from .placement import Module, name_all_in_text, read_modules
from .sites import read_sites


class Parameter(NamedTuple):
    """A parameter, as the newest row says."""

    site_id: int
    module: Module  # that owns it
    slot: str  # its name in the module
    name: str  # the full path: `head.weight`; see `name_in_text`
    shape: tuple[int, ...]
    dtype: str
    requires_grad: bool
    optimizer: str | None  # None: none that has stepped
    group: int | None
    has_gradient: bool | None  # None if an optimizer updates it: its gradient is measured
    was_updated: bool  # whether any row names an optimizer

    @property
    def numel(self) -> int:
        """The number of elements."""
        return int(np.prod(self.shape, dtype=np.int64))


def read_parameters(data: RecordingData) -> list[Parameter]:
    """Returns the parameters of all models that trained, in the order in which they were first seen."""
    parameters = data.table("parameters")
    modules, sites = read_modules(data), read_sites(data, column_of(parameters, "site_id"))
    seen = parameters.to_pylist()
    rows = {row["site_id"]: row for row in seen}  # the last row counts
    updated = {row["site_id"] for row in seen if row["optimizer"] is not None}
    owned = []
    for site_id, row in rows.items():
        site = sites.get(site_id)
        module = None if site is None or site.module_id is None else modules.get(site.module_id)
        if site is not None and module is not None:
            owned.append((row, site.slot, module, modules.get(module.root_id, module)))
    paths = ((root.name or root.type, join(module.path, slot)) for _, slot, module, root in owned)
    return [
        Parameter(
            row["site_id"],
            module,
            slot,
            name,
            tuple(row["shape"]),
            row["dtype"],
            row["requires_grad"],
            row["optimizer"],
            row["param_group"],
            row["has_gradient"],
            row["site_id"] in updated,
        )
        for (row, slot, module, _), name in zip(owned, name_all_in_text(data, paths), strict=True)
    ]
