"""Reads which parameters a model has, whether they require gradients, and which optimizer updates them."""

from typing import NamedTuple

import numpy as np

from ...recording.module_path import join
from ...recording.protocols import RecordingData
from .columns import column_of
from .placement import Module, name_in_text, read_modules
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

    @property
    def numel(self) -> int:
        """The number of elements."""
        return int(np.prod(self.shape, dtype=np.int64))


def read_parameters(data: RecordingData) -> list[Parameter]:
    """Returns the parameters of all models that trained, in the order in which they were first seen."""
    parameters = data.table("parameters")
    modules, sites = read_modules(data), read_sites(data, column_of(parameters, "site_id"))
    rows = {row["site_id"]: row for row in parameters.to_pylist()}  # the last row counts
    found = []
    for site_id, row in rows.items():
        site = sites.get(site_id)
        module = None if site is None or site.module_id is None else modules.get(site.module_id)
        if site is not None and module is not None:
            facts = (
                row["dtype"],
                row["requires_grad"],
                row["optimizer"],
                row["param_group"],
                row["has_gradient"],
            )
            root = modules.get(module.root_id, module)
            name = name_in_text(data, root.name or root.type, join(module.path, site.slot))
            found.append(Parameter(site_id, module, site.slot, name, tuple(row["shape"]), *facts))
    return found
