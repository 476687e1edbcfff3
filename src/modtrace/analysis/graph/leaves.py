"""Finds the leaves of a graph: tensors that are read, and that no op of the graph has made."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from ...recording import role
from ...recording.arrow.arrays import from_numpy
from ...recording.protocols import RecordingData
from ..tables.columns import Column, Rows, column_of, find_rows
from ..tables.sites import Site, read_sites
from ..tables.tensors import Tensors
from .columns import BUFFER, CONSTANT, EARLIER, INPUT, LAYER_KINDS, NODE_KINDS, NONE, PARAMETER, PHASE
from .layers import LayerTree, common_layer

_KIND_OF_ROLE = {role.PARAMETER: PARAMETER, role.BUFFER: BUFFER, role.INPUT: INPUT, role.LEAF: CONSTANT}


@dataclass(frozen=True, kw_only=True, eq=False)
class Leaves:
    """Leaves as columns."""

    tensor: Rows
    kind: Column  # codes of NODE_KINDS
    name: list[str]  # of a parameter or buffer its path; of an input its place among the arguments
    root: list[str]  # the name of its root, where the recording has several roots; else ""
    site: Column  # site_id; -1 for none
    time_ns: Column  # when it was first read
    layer: Rows


class Readers(NamedTuple):
    """The readers of tensors: first ops, then outputs."""

    tensor: Rows
    layer: Rows
    time_ns: Column
    op_count: int  # of them are ops


def find_leaves(
    data: RecordingData,
    readers: Readers,
    tensors: Tensors,
    given: Mapping[int, str],
    tree: LayerTree,
) -> Leaves:
    """Returns the leaves that ops read or that are returned.

    Args:
        data: the recording.
        readers: the readers of tensors.
        tensors: the tensors of the graph.
        given: for tensors among the arguments of a root, their position.
        tree: the layers.
    """
    by_time = np.argsort(readers.time_ns, kind="stable")
    by_time = by_time[tensors.producer[readers.tensor[by_time]] < 0]
    tensor, first = np.unique(readers.tensor[by_time], return_index=True)
    site = tensors.site_id[tensor]
    sites = read_sites(data)
    kinds, names, roots = _name_sites(data, list(sites.values()))
    at = find_rows(np.array([*sites], np.int64), site).tolist()
    made_by = column_of(tensors.table, "producer_op")[tensor]  # need not be in the graph
    earlier = _name_ops(data, np.where(site < 0, made_by, NONE))
    unnamed = [(EARLIER, name) if name else (CONSTANT, CONSTANT) for name in earlier]
    found = [
        (kinds[row], names[row]) if row >= 0 else (INPUT, given[each]) if each in given else other
        for row, other, each in zip(at, unnamed, tensor.tolist(), strict=True)
    ]
    kind = np.array([NODE_KINDS.index(each) for each, _ in found], np.int8)
    reader = by_time[first]
    return Leaves(
        tensor=tensor,
        kind=kind,
        name=[name for _, name in found],
        root=[roots[row] if row >= 0 else "" for row in at],
        site=site,
        time_ns=readers.time_ns[reader],
        layer=_place(tensor, kind, readers, readers.layer[reader], tree),
    )


def _name_ops(data: RecordingData, op_id: Column) -> list[str | None]:
    """Returns the names of ops; None for -1."""
    ops = data.table("ops")
    rows = find_rows(column_of(ops, "op_id"), op_id)
    known = (
        ops["name"].take(from_numpy(np.maximum(rows, 0))).to_pylist() if ops.num_rows else [""] * len(rows)
    )
    names = [name if row >= 0 else EARLIER for name, row in zip(known, rows.tolist(), strict=True)]
    return [name if op >= 0 else None for name, op in zip(names, op_id.tolist(), strict=True)]


def _name_sites(data: RecordingData, sites: list[Site]) -> tuple[list[str], list[str], list[str]]:
    """Returns the kind of leaf, the name and, if the recording has several roots, the root of each site."""
    modules = {row["module_id"]: row for row in data.table("modules").to_pylist()}
    roots = {
        number: row["name"] or row["type"] for number, row in modules.items() if row["parent_id"] is None
    }
    shown = {number: roots.get(row["root_id"], "") for number, row in modules.items() if len(roots) > 1}
    kinds = [_KIND_OF_ROLE.get(site.role or "", CONSTANT) for site in sites]
    names = [
        (site.name if kind in (PARAMETER, BUFFER) else site.slot) or kind
        for site, kind in zip(sites, kinds, strict=True)
    ]
    return kinds, names, [shown.get(-1 if site.module_id is None else site.module_id, "") for site in sites]


def _place(tensor: Rows, kind: Column, readers: Readers, first: Rows, tree: LayerTree) -> Rows:
    """Returns the layer of each leaf: the innermost one with all ops that read it in the phase of the first of them.

    An input is in no module, nor is a tensor that is only returned.

    Args:
        tensor: the leaves.
        kind: their kinds.
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
    """Returns the layer of the phase of each layer."""
    is_phase = tree.kind == LAYER_KINDS.index(PHASE)
    found = np.maximum.accumulate(np.where(is_phase, np.arange(len(is_phase)), NONE))
    return np.asarray(found)
