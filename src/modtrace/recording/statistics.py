"""What the raw statistics of stat rows mean, without torch."""

import numpy as np
import pyarrow as pa

_SCANNED = ["step", "order", "nan_count", "inf_count"]


def first_nonfinite_row(values: pa.Table) -> int | None:
    """The index of the first row, by step and order, of a tensor with NaN or infinite elements; None without.

    Reads four columns of the `values` table a batch at a time: of a memory-mapped one, only their pages.
    """
    first: tuple[int, int, int] | None = None  # step, order, row
    offset = 0
    for batch in values.select(_SCANNED).to_batches():
        step, order, nan_count, inf_count = (column.to_numpy() for column in batch.columns)
        rows = np.flatnonzero((nan_count | inf_count) > 0)
        if len(rows):
            row = rows[np.lexsort((order[rows], step[rows]))[0]]
            found = (int(step[row]), int(order[row]), offset + int(row))
            first = found if first is None else min(first, found)
        offset += batch.num_rows
    return first[2] if first is not None else None
