"""What is asked of raw statistics."""

import pyarrow as pa

from modtrace.recording.batches import to_batch
from modtrace.recording.schema import schema
from modtrace.recording.statistics import first_nonfinite_row


def stat_rows(*rows: tuple[int, int, int, int]) -> pa.RecordBatch:
    step, order, nan_count, inf_count = zip(*rows, strict=True)
    columns = {"step": step, "order": order, "nan_count": nan_count, "inf_count": inf_count}
    return to_batch("values", columns)


def test_first_nonfinite_row_is_first_by_step_and_order() -> None:
    later = stat_rows((0, 0, 0, 0), (3, 5, 1, 0), (3, 4, 0, 2))
    earlier = stat_rows((3, 9, 1, 1), (2, 7, 0, 1), (2, 6, 0, 0))
    assert first_nonfinite_row(pa.Table.from_batches([later, earlier])) == 4
    assert first_nonfinite_row(pa.Table.from_batches([later])) == 2


def test_finite_rows_have_no_first_nonfinite_one() -> None:
    assert first_nonfinite_row(pa.Table.from_batches([stat_rows((0, 0, 0, 0))])) is None
    assert first_nonfinite_row(schema("values").empty_table()) is None
