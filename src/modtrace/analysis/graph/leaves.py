"""Finds the leaves of a graph: tensors that are read but not made by an op of the graph."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from ...recording import role
from ...recording.protocols import RecordingData
from ..tables.columns import Column, Rows, find_rows
from ..tables.ops import name_ops
from ..tables.sites import Site, name_roots_of_modules, read_sites
from ..tables.tensors import Tensors
from .columns import BUFFER, CONSTANT, EARLIER, INPUT, LAYER_KINDS, NODE_KINDS, NONE, PARAMETER, PHASE
from .layers import LayerTree, common_layer

_KIND_OF_ROLE = {role.PARAMETER: PARAMETER, role.BUFFER: BUFFER, role.INPUT: INPUT, role.LEAF: CONSTANT}


@dataclass(frozen=True, kw_only=True, eq=False)
class Leaves:
    """The leaves of a graph as columns."""

    tensor: Rows
    kind: Column  # codes of NODE_KINDS
    name: list[str]  # the path of a parameter or buffer; the position of an input among the arguments
    root: list[str]  # the name of the root if the recording has several; else ""
    site: Column  # the site_id; -1 for none
    time_ns: Column  # the time at which the leaf was first read
    layer: Rows


class Readers(NamedTuple):
    """The readers of tensors: ops first, then outputs of roots."""

    tensor: Rows
    layer: Rows
    time_ns: Column
    op_count: int  # how many of the readers are ops


def find_leaves(
    data: RecordingData,
    readers: Readers,
    tensors: Tensors,
    given: Mapping[int, str],
    tree: LayerTree,
) -> Leaves:
    """Returns the leaves: tensors that ops read or roots return, and that no op of the graph made.

    Args:
        data: the recording.
        readers: the readers of tensors.
        tensors: the tensors of the graph.
        given: the position of each tensor that is among the arguments of a root.
        tree: the layers.
    """
    by_time = np.argsort(readers.time_ns, kind="stable")
    by_time = by_time[tensors.producer[readers.tensor[by_time]] < 0]
    tensor, first = np.unique(readers.tensor[by_time], return_index=True)
    site = tensors.site_id[tensor]
    sites = read_sites(data, site)
    kinds, names, roots = _name_sites(data, list(sites.values()))
    at = find_rows(np.array([*sites], np.int64), site).tolist()
    made_by = np.where(site < 0, tensors.producer_op[tensor], NONE)
    described = []
    for row, number, op, name in zip(
        at, tensor.tolist(), made_by.tolist(), name_ops(data, made_by), strict=True
    ):
        if row >= 0:
            described.append((kinds[row], names[row]))
        elif number in given:
            described.append((INPUT, given[number]))
        else:
            described.append((EARLIER, name or EARLIER) if op >= 0 else (CONSTANT, CONSTANT))
    kind = np.array([NODE_KINDS.index(leaf_kind) for leaf_kind, _ in described], np.int8)
    reader = by_time[first]
    return Leaves(
        tensor=tensor,
        kind=kind,
        name=[name for _, name in described],
        root=[roots[row] if row >= 0 else "" for row in at],
        site=site,
        time_ns=readers.time_ns[reader],
        layer=_place(tensor, kind, readers, readers.layer[reader], tree),
    )


def _name_sites(data: RecordingData, sites: list[Site]) -> tuple[list[str], list[str], list[str]]:
    """Returns the kind of leaf, the name and, if the recording has several roots, the root of each site."""
    roots = name_roots_of_modules(data)
    kinds = [_KIND_OF_ROLE.get(site.role or "", CONSTANT) for site in sites]
    names = [
        (site.name if kind in (PARAMETER, BUFFER) else site.slot) or kind
        for site, kind in zip(sites, kinds, strict=True)
    ]
    return kinds, names, [roots.get(-1 if site.module_id is None else site.module_id, "") for site in sites]


def _place(tensor: Rows, kind: Column, readers: Readers, first: Rows, tree: LayerTree) -> Rows:
    """Returns the layer of each leaf: the innermost one around all ops of its first reader's phase that read it.

    An input, and a tensor that is only returned, is outside of all modules.

    Args:
        tensor: the rows of the leaves among the tensors.
        kind: the kind of each leaf.
        readers: the readers of tensors.
        first: the layer of the first reader of each leaf.
        tree: the layers.
    """
    phase = np.append(outermost_phase(tree), NONE)
    leaf_of = np.full(int(readers.tensor.max(initial=-1)) + 1, NONE, np.int64)
    leaf_of[tensor] = np.arange(len(tensor))
    leaf, layer = leaf_of[readers.tensor], readers.layer
    first_phase = phase[np.append(first, NONE)[leaf]]
    kept = (leaf >= 0) & (phase[layer] == first_phase)
    is_read = np.zeros(len(tensor), bool)
    is_op = kept & (np.arange(len(kept)) < readers.op_count)
    is_read[leaf[is_op]] = True
    kept = is_op | (kept & ~np.append(is_read, True)[leaf])
    low = np.full(len(tensor), len(tree.parent), np.int64)
    high = np.full(len(tensor), NONE, np.int64)
    np.minimum.at(low, leaf[kept], layer[kept])
    np.maximum.at(high, leaf[kept], layer[kept])
    around = common_layer(low, high, tree.parent, tree.last)
    return np.where(kind == NODE_KINDS.index(INPUT), phase[first], around)


def outermost_phase(tree: LayerTree) -> Rows:
    """Returns for each layer the layer of its phase."""
    is_phase = tree.kind == LAYER_KINDS.index(PHASE)
    found = np.maximum.accumulate(np.where(is_phase, np.arange(len(is_phase)), NONE))
    return np.asarray(found)
