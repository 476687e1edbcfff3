"""Turns columns as collectors hold them into Arrow batches of a table's schema."""

from collections.abc import Mapping
from typing import Any

import numpy as np
import pyarrow as pa

from .phase import PHASES
from .schema import schema


def to_batch(table: str, columns: Mapping[str, Any]) -> pa.RecordBatch:
    """One batch of `table` from its columns; see `Sink.write` for what may be given.

    A masked array means null where it is masked; integers given for a phase are codes of `PHASES`.

    Raises:
        ValueError: a column is not in the schema, none is given, or lengths differ.
    """
    fields = schema(table)
    unknown = [name for name in columns if fields.get_field_index(name) < 0]
    if unknown or not columns:
        raise ValueError(f"table {table!r} has no column {', '.join(map(repr, unknown)) or '(none was given)'}")
    rows = len(next(iter(columns.values())))
    arrays = [
        _to_array(columns[each.name], each) if each.name in columns else _absent(each, rows) for each in fields
    ]
    return pa.RecordBatch.from_arrays(arrays, schema=fields)


def _to_array(values: Any, field: pa.Field) -> pa.Array:
    if isinstance(values, pa.Array):
        return values
    if field.type == _PHASE_TYPE:
        return _phases(values)
    if isinstance(values, np.ma.MaskedArray):
        mask = np.ma.getmaskarray(values)
        return pa.array(values.data, type=field.type, mask=mask)
    return pa.array(values, type=field.type)


def _absent(field: pa.Field, rows: int) -> pa.Array:
    if field.nullable:
        return pa.nulls(rows, field.type)
    if pa.types.is_integer(field.type) or pa.types.is_boolean(field.type) or pa.types.is_floating(field.type):
        return pa.array(np.zeros(rows, field.type.to_pandas_dtype()), type=field.type)
    if pa.types.is_list(field.type):
        return pa.array([[]] * rows, type=field.type)
    return pa.array([""] * rows, type=field.type)


_PHASE_TYPE = pa.dictionary(pa.int8(), pa.string())


def _phases(values: Any) -> pa.Array:
    if isinstance(values, np.ndarray) and values.dtype.kind in "iu":
        codes = pa.array(values.astype(np.int8, copy=False))
    else:
        codes = pa.array([None if each is None else PHASES.index(each) for each in values], pa.int8())
    return pa.DictionaryArray.from_arrays(codes, pa.array(PHASES))
