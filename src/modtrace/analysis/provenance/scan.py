"""Finds the steps that are worth following: some value in them was not finite."""

import numpy as np

from ...recording.arrow.arrays import to_numpy
from ...recording.protocols import RecordingData


def find_suspicious_steps(data: RecordingData) -> list[tuple[int, bytes]]:
    """Returns the steps with NaN or infinite values, in order, each with a key.

    Steps that have NaN and infinities at the same sites have equal keys. The function reads four columns of `values` a
    batch at a time. Of a memory-mapped table, only their pages are read.
    """
    found = [np.empty((3, 0), np.int64)]
    columns = ["nan_count", "inf_count", "step", "site_id"]
    for batch in data.table("values").select(columns).to_batches():
        nan_count, inf_count, step, site = (to_numpy(column) for column in batch.columns)
        rows = np.flatnonzero((nan_count | inf_count) > 0)
        kind = (nan_count[rows] > 0) + 2 * (inf_count[rows] > 0)
        found.append(np.stack([step[rows], site[rows], kind]).astype(np.int64))
    every = np.concatenate(found, axis=1)
    every = every[:, np.lexsort(every[::-1])]
    is_new = np.ones(every.shape[1], bool)
    is_new[1:] = (every[:, 1:] != every[:, :-1]).any(axis=0)
    every = every[:, is_new]
    steps, starts = np.unique(every[0], return_index=True)
    of_steps = np.split(every[1:], starts, axis=1)[1:]
    return [(step, rows.tobytes()) for step, rows in zip(steps.tolist(), of_steps, strict=True)]
