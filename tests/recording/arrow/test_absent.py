"""Columns that nobody fills share one buffer."""

import pyarrow as pa
import pytest

from modtrace.recording.arrow.absent import absent_column
from modtrace.recording.schema import schema, schemas

FIELDS = [field for name in schemas() for field in schema(name)]


@pytest.mark.parametrize("rows", [0, 1, 100, 100_000])
def test_absent_column_is_null_or_empty(rows: int) -> None:
    for field in {(each.type, each.nullable): each for each in FIELDS}.values():
        column = absent_column(field, rows)
        column.validate(full=True)
        assert (column.type, len(column)) == (field.type, rows)
        assert column.null_count == (rows if field.nullable else 0)
        assert column.slice(0, 2).to_pylist() == [_empty(field)] * min(rows, 2)


def _empty(field: pa.Field) -> object:
    if field.nullable:
        return None
    if pa.types.is_list(field.type):
        return []
    return 0 if pa.types.is_primitive(field.type) else ""


def test_absent_columns_share_their_buffer() -> None:
    before = pa.total_allocated_bytes()
    columns = [absent_column(pa.field("flops", pa.int64()), rows) for rows in range(0, 5000, 7)]
    assert len({column.buffers()[1].address for column in columns}) == 1
    assert pa.total_allocated_bytes() == before
