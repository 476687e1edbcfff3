"""The references to whole tensors in rows of `values`."""

import re
from collections.abc import Callable

import pyarrow as pa

BLOB = "blob"

#: Stands in the place of the file where a recording in memory has the tensor.
IN_MEMORY = "memory"

_REFERENCE = re.compile(rf"({IN_MEMORY}|tensors-\d{{5,}}\.safetensors):\d{{6,}}\..*", re.DOTALL)


def is_reference(blob: str) -> bool:
    """Whether it is what a sink gave for a tensor: `FILE:NUMBER.NAME`."""
    return _REFERENCE.fullmatch(blob) is not None


def with_blobs(values: pa.Table, replace: Callable[[str, int], str | None]) -> pa.Table:
    """The rows with other references, in order; a reference that several rows share is replaced once.

    Args:
        values: rows of `values`; those of the same tensor come in one table.
        replace: gives the new reference for an old one and the step of its row; None for none.
    """
    at = values.schema.get_field_index(BLOB)
    if at < 0 or values.column(at).null_count == values.num_rows:
        return values
    new: dict[str, str | None] = {}
    column: list[str | None] = []
    for blob, step in zip(values.column(at).to_pylist(), values.column("step").to_pylist(), strict=True):
        if blob is not None and blob not in new:
            new[blob] = replace(blob, step)
        column.append(None if blob is None else new[blob])
    return values.set_column(at, values.schema.field(at), pa.array(column, pa.string()))
