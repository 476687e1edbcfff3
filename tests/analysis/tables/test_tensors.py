"""Shapes, sizes and memory of many tensors as columns: those that each tensor has by itself."""

import math

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from modtrace.analysis.tables.tensors import Tensors, count_elements, read_sizes
from modtrace.errors import DamagedRecordingError

SHAPES = st.lists(st.integers(0, 4), max_size=4)
ROWS = st.lists(
    st.builds(
        lambda shape, strides, offset, storage: (shape, strides[: len(shape)], offset, storage),
        SHAPES,
        st.lists(st.integers(0, 5), min_size=4, max_size=4),
        st.integers(0, 9),
        st.none() | st.integers(0, 3),
    ),
    max_size=8,
)


def make_tensors(rows: list[tuple[list[int], list[int], int, int | None]], split: int) -> Tensors:
    """Returns tensors whose table has two chunks, the second of which begins inside of a buffer."""
    lists = pa.list_(pa.int64())
    columns = {
        "shape": pa.array([shape for shape, *_ in rows], lists),
        "stride": pa.array([stride if storage is not None else [] for _, stride, _, storage in rows], lists),
        "offset": pa.array([offset for *_, offset, _ in rows], pa.int64()),
        "storage": pa.array([storage for *_, storage in rows], pa.int64()),
    }
    table = pa.table(columns)
    table = pa.concat_tables([table.slice(0, split), table.slice(split)])
    none = np.full(len(rows), -1, np.int64)
    return Tensors(tensor_id=np.arange(len(rows)), producer=none, slot=none, table=table, slots=())


@settings(deadline=None)
@given(ROWS, st.integers(0, 8))
def test_columns_of_tensors_are_those_of_each_tensor(
    rows: list[tuple[list[int], list[int], int, int | None]], split: int
) -> None:
    tensors = make_tensors(rows, min(split, len(rows)))
    assert tensors.shapes == [tuple(shape) for shape, *_ in rows]
    assert tensors.numel.tolist() == [math.prod(shape) for shape, *_ in rows]
    bounds = []
    for shape, strides, offset, storage in rows:
        extent = 1 + sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True))
        bounds.append((0, 1) if storage is None else (offset, offset + (extent if math.prod(shape) else 0)))
    assert list(zip(*(column.tolist() for column in tensors.bounds), strict=True)) == bounds
    memory = tensors.memory.tolist()
    for row, (*_, storage) in enumerate(rows):
        assert memory[row] == (-1 - row if storage is None else storage)


def test_strides_that_do_not_fit_the_shape_are_damage() -> None:
    tensors = make_tensors([([2, 3], [3, 1], 0, 0), ([2, 3], [3], 0, 1)], 1)
    with pytest.raises(DamagedRecordingError, match=r"^tensors.stride: a tensor of 2 sizes has 1 stride\. "):
        _ = tensors.bounds


def test_one_long_shape_does_not_widen_the_matrix_for_all() -> None:
    long = [2, 3] + [1] * 1000 + [5]
    shapes = pa.chunked_array([pa.array([[4], long, [], [2] * 16, [2] * 17], pa.list_(pa.int64()))])
    sizes = read_sizes(shapes)
    assert sizes.shape == (5, 16)
    assert count_elements(sizes).reshape(-1).tolist() == [4, 30, 1, 2**16, 2**17]
    assert sizes[0].tolist() == [4] + [-1] * 15
