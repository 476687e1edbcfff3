"""Finds the steps that are worth following: ops were measured in them, and some value was not finite."""

from collections.abc import Collection, Iterator
from dataclasses import dataclass

import numpy as np
import pyarrow as pa

from ...recording.arrow.arrays import to_numpy
from ...recording.protocols import RecordingData
from ...recording.role import OP_OUTPUT
from ..step.calls import Column


@dataclass(frozen=True)
class Scanned:
    """What the rows of `values` say of steps."""

    of_ops: Collection[int]  # the steps in which outputs of ops were measured
    #: Of those, in order, the steps with values that are not finite, each with their sites and kinds: steps that have
    #: NaN and infinities at the same sites are alike.
    suspicious: list[tuple[int, bytes]]


def scan_steps(data: RecordingData) -> Scanned:
    """Returns the steps in which ops were measured, and those of them with values that are not finite.

    It reads four columns of `values` a batch at a time. Of a memory-mapped table, only their pages are read.
    """
    of_ops: set[int] = set()
    found = [np.empty((3, 0), np.int64)]
    sites = _sites_of_ops(data)
    if len(sites):
        for step, site, kind in _batches(data.table("values")):
            of_ops.update(np.unique(step[np.isin(site, sites)]).tolist())
            rows = np.flatnonzero(kind)
            found.append(np.stack([step[rows], site[rows], kind[rows]]).astype(np.int64))
    return Scanned(of_ops, list(_by_step(np.concatenate(found, axis=1), of_ops)))


def _sites_of_ops(data: RecordingData) -> Column:
    sites = data.table("sites").select(["site_id", "role"])
    rows = [row["site_id"] for row in sites.to_pylist() if row["role"] == OP_OUTPUT]
    return np.array(rows, np.int64)


def _batches(values: pa.Table) -> Iterator[tuple[Column, Column, Column]]:
    """Yields step and site of each row, and 1 if it has NaN, 2 if it has infinities, 3 if both."""
    for batch in values.select(["step", "site_id", "nan_count", "inf_count"]).to_batches():
        step, site, nan_count, inf_count = (to_numpy(column) for column in batch.columns)
        yield step, site, (nan_count > 0) + 2 * (inf_count > 0)


def _by_step(found: Column, of_ops: Collection[int]) -> Iterator[tuple[int, bytes]]:
    found = found[:, np.lexsort((found[2], found[1], found[0]))]
    steps, starts = np.unique(found[0], return_index=True)
    if not len(steps):
        return
    for step, rows in zip(steps.tolist(), np.split(found[1:], starts[1:], axis=1), strict=True):
        if step in of_ops:
            yield step, np.unique(rows, axis=1).tobytes()
