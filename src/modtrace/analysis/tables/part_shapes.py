"""Gives activations that ranks have in parts the shape that another run shows, as it is not known how they were cut."""

from functools import partial

import numpy as np
import pyarrow as pa

from ...recording.arrow.arrays import from_numpy, to_numpy
from ...recording.protocols import RecordingData
from .columns import ArrowTable, find_rows, take
from .rank_values import read_rank_values
from .ranks import BATCHED, RanksData
from .tensors import read_sizes, widen
from .with_tables import WithTables


def align_shapes(a: RecordingData, b: RecordingData) -> tuple[RecordingData, RecordingData]:
    """Returns two runs, of which activations that were merged from ranks have one shape in both.

    Ranks may have parts of the batch, of the sequence or of the features. A plain tensor does not say which, so the
    shape that the parts have together is taken from the run on the other side, if it has as many elements.
    """
    are_merged = isinstance(a, RanksData), isinstance(b, RanksData)
    made = [
        partial(_take_shapes, b, a, are_known=are_merged[1]),
        partial(_take_shapes, a, b, are_known=False),
    ]
    one, other = (
        WithTables(run, values=values) if is_merged else run
        for run, values, is_merged in zip((a, b), made, are_merged, strict=True)
    )
    return one, other


def _take_shapes(known: RecordingData, merged: RecordingData, *, are_known: bool) -> ArrowTable:
    """Returns `values` of a merged run, with the shapes of parts taken from another run.

    With `are_known`, only what was not measured takes them: the other run takes those of the rest.
    """
    most_parts = merged.most_parts if isinstance(merged, RanksData) else 1
    runs = read_rank_values([(0, known), (1, merged)])
    one, other = runs[0].placed, runs[1].placed
    at, table = find_rows(runs[0].key, runs[1].key), other.table
    given, wanted = widen(read_sizes(table["shape"]), read_sizes(one.table["shape"])[at])
    is_measured = to_numpy(table["count"].is_valid())
    is_taken = (at >= 0) & other.is_of(*BATCHED) & ~to_numpy(table["global_shape"].is_valid())
    is_taken &= (given != wanted).any(axis=1) & ((given < 0) == (wanted < 0)).all(axis=1)
    ratio = take(one.numel, at) / np.maximum(other.numel, 1)
    is_whole = ~is_measured & (ratio > 0) & (most_parts % np.maximum(ratio, 1) == 0)
    is_taken &= is_whole & (ratio > 1) if are_known else is_whole | (ratio == 1)
    if not is_taken.any():
        return table
    rows = np.where(is_taken, len(table) + at, np.arange(len(table)))
    for name in ("shape", "numel"):
        both = pa.chunked_array([*table[name].chunks, *one.table[name].chunks], table[name].type)
        table = table.set_column(
            table.schema.get_field_index(name), table.schema.field(name), both.take(from_numpy(rows))
        )
    return table
