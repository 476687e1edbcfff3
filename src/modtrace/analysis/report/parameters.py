"""Builds the table of parameters: shape, dtype, and the sites of their values and gradients."""

from collections.abc import Iterator, Mapping

import numpy as np

from ...recording.role import PARAMETER, PARAMETER_GRAD
from ..graph import columns
from ..graph.columns import Graph
from ..tables.columns import Rows
from ..tables.tensors import shape_text
from .modules import Place
from .series import RoleValues
from .tables import NONE, ReportTable, number_column, text_column

#: The place of a parameter's module, and the parameter's name.
_Key = tuple[Place, str]


def tabulate_parameters(measured: list[RoleValues], graph: Graph, index: Mapping[Place, int]) -> ReportTable:
    """Returns a row for each parameter that was measured or that ops of the graph read.

    measured: the measured values, one entry a role.
        measured: what was measured, role by role.
        graph: the graph of the shown step.
        index: the row of each module.
    """
    known: dict[_Key, tuple[str, str]] = {}  # by parameter, its shape and dtype
    sites: dict[str | None, dict[_Key, int]] = {PARAMETER: {}, PARAMETER_GRAD: {}, None: {}}
    for key, shape, dtype, role, site in (*_find_measured(measured), *_find_read(graph)):
        known.setdefault(key, (shape, dtype))
        sites[role][key] = site

    def take(numbers: Mapping[_Key, int]) -> Rows:
        return np.array([numbers.get(key, NONE) for key in known], np.int64)

    return ReportTable(
        rows=len(known),
        columns=(
            number_column(
                "module", "module", "module", take({key: index.get(key[0], NONE) for key in known})
            ),
            text_column("label", "parameter", (name for _, name in known)),
            text_column("shape", "shape", (shape for shape, _ in known.values())),
            text_column("dtype", "dtype", (dtype for _, dtype in known.values()), kind="dtype"),
            number_column("site", "values", "site", take(sites[PARAMETER])),
            number_column("gradient", "gradients", "site", take(sites[PARAMETER_GRAD])),
        ),
    )


def _find_measured(measured: list[RoleValues]) -> Iterator[tuple[_Key, str, str, str | None, int]]:
    """Yields place and name, shape, dtype, role and site of each measured parameter or gradient."""
    for values in measured:
        if values.role in (PARAMETER, PARAMETER_GRAD):
            selected = values.selected
            sites, rows = np.unique(selected.site, return_index=True)
            table = selected.select("shape", "dtype").take(rows).to_pylist()
            for site, row in zip(sites.tolist(), table, strict=True):
                owner = selected.owners[site]
                key = ((owner.root, owner.path), owner.slot)
                yield key, shape_text(row["shape"]), row["dtype"], values.role, values.first_site + site


def _find_read(graph: Graph) -> Iterator[tuple[_Key, str, str, str | None, int]]:
    """Yields place and name, shape and dtype of the parameters that ops read, in the same form."""
    nodes, layers, tensors = graph.nodes, graph.layers, graph.tensors
    for node in np.flatnonzero(nodes.kind == columns.NODE_KINDS.index(columns.PARAMETER)).tolist():
        layer, tensor = int(nodes.layer[node]), int(nodes.tensor[node])
        if layer < 0 or tensor < 0:
            continue
        path, _, name = nodes.names[int(nodes.name[node])].rpartition(".")
        root = layers.places[int(layers.place[layer])].root
        yield ((root, path), name), shape_text(tensors.shapes[tensor]), tensors.dtypes[tensor], None, NONE
