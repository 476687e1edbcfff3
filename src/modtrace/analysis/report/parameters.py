"""Makes the table of parameters: shape, dtype, and the sites of their values and gradients."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import numpy as np

from ...recording.role import PARAMETER, PARAMETER_GRAD
from ..graph import columns
from ..graph.columns import Graph
from ..tables.tensors import shape_text
from .modules import Place
from .series import RoleValues
from .tables import NONE, ReportTable, number_column, text_column


@dataclass
class _Parameter:
    module: int
    name: str
    shape: str
    dtype: str
    site: int = NONE
    gradient: int = NONE


def tabulate_parameters(measured: list[RoleValues], graph: Graph, index: Mapping[Place, int]) -> ReportTable:
    """Returns a row for each parameter that was measured or that ops of the graph read.

    Args:
        measured: what was measured, role by role; sites are numbered through all of it.
        graph: the graph of the shown step.
        index: the row of each module.
    """
    found: dict[tuple[Place, str], _Parameter] = {}
    for place, name, shape, dtype, role, site in (*_measured(measured), *_read(graph)):
        module = index.get(place, NONE)
        each = found.setdefault((place, name), _Parameter(module, name, shape, dtype))
        if role == PARAMETER:
            each.site = site
        elif role == PARAMETER_GRAD:
            each.gradient = site
    rows = list(found.values())
    numbers = np.array([(each.module, each.site, each.gradient) for each in rows], np.int64).reshape(-1, 3).T
    return ReportTable(
        rows=len(rows),
        columns=(
            number_column("module", "module", "module", numbers[0]),
            text_column("label", "parameter", (each.name for each in rows)),
            text_column("shape", "shape", (each.shape for each in rows)),
            text_column("dtype", "dtype", (each.dtype for each in rows), kind="dtype"),
            number_column("site", "values", "site", numbers[1]),
            number_column("gradient", "gradients", "site", numbers[2]),
        ),
    )


_Told = tuple[Place, str, str, str, str | None, int]


def _measured(measured: list[RoleValues]) -> Iterator[_Told]:
    """Yields place, name, shape, dtype, role and site."""
    first = 0
    for each in measured:
        if each.role in (PARAMETER, PARAMETER_GRAD):
            sites, rows = np.unique(each.found.site, return_index=True)
            table = each.found.table.select(["shape", "dtype"]).take(rows).to_pylist()
            for site, row in zip(sites.tolist(), table, strict=True):
                owner = each.found.owners[site]
                place = (owner.root, owner.path)
                yield place, owner.slot, shape_text(row["shape"]), row["dtype"], each.role, first + site
        first += len(each.found.names)


def _read(graph: Graph) -> Iterator[_Told]:
    """Yields the same of the parameters that ops read."""
    nodes, layers, tensors = graph.nodes, graph.layers, graph.tensors
    for node in np.flatnonzero(nodes.kind == columns.NODE_KINDS.index(columns.PARAMETER)).tolist():
        layer, tensor = int(nodes.layer[node]), int(nodes.tensor[node])
        if layer < 0 or tensor < 0:
            continue
        path, _, name = nodes.names[int(nodes.name[node])].rpartition(".")
        root = layers.places[int(layers.place[layer])].root
        yield (root, path), name, tensors.shape_texts[tensor], tensors.dtypes[tensor], None, NONE
