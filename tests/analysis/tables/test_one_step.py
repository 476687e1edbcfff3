"""Rows are found by their ids, in whichever batch they are and in whichever order."""

from typing import Any

import numpy as np
import pyarrow as pa

from builders import RecordingBuilder
from modtrace.analysis.tables.indexed_tables import IndexedTables
from modtrace.analysis.tables.one_step import OneStep
from modtrace.recording.arrow.batches import to_batch


class Batched:
    """A recording whose tables have one batch for each list of rows."""

    def __init__(self, **tables: list[dict[str, list[object]]]) -> None:
        self._data = RecordingBuilder().data()
        self._tables = {
            name: pa.Table.from_batches([to_batch(name, each) for each in batches])
            for name, batches in tables.items()
        }

    def table(self, name: str) -> pa.Table:
        return self._tables[name] if name in self._tables else self._data.table(name)


def uses(*pairs: tuple[int | None, int]) -> dict[str, list[object]]:
    return {"consumer_op": [op for op, _ in pairs], "tensor_id": [tensor for _, tensor in pairs]}


def found(data: Any, **wanted: list[int]) -> list[int]:
    columns = {name: np.array(ids, np.int64) for name, ids in wanted.items()}
    return IndexedTables(data).find("uses", ["tensor_id"], **columns)["tensor_id"].to_pylist()


def test_rows_are_found_in_every_batch_in_the_order_of_the_table() -> None:
    data = Batched(
        uses=[uses((7, 70), (None, 71), (3, 72)), uses((None, 73)), uses((3, 74), (9, 75), (7, 76))]
    )
    assert found(data, consumer_op=[7, 3]) == [70, 72, 74, 76]
    assert found(data, consumer_op=[9, 9]) == [75]
    assert found(data, consumer_op=[8, 2**40]) == []
    assert found(data, consumer_op=[]) == []


def test_null_is_no_id() -> None:
    assert found(Batched(uses=[uses((None, 71), (3, 72))]), consumer_op=[-1]) == []


def test_row_that_has_an_id_in_each_of_two_columns_is_found_once() -> None:
    data = Batched(uses=[uses((1, 5), (2, 6)), uses((3, 6), (4, 7))])
    assert found(data, consumer_op=[2, 4], tensor_id=[6]) == [6, 6, 7]


def test_table_without_rows_has_none() -> None:
    assert found(RecordingBuilder().data(), consumer_op=[1]) == []


def test_step_has_its_calls_and_all_of_an_earlier_step_to_which_it_refers() -> None:
    build = RecordingBuilder()
    net = build.module("", "Net")
    calls = []
    for step in range(3):
        build.step(step, 100 * step, 100 * step + 99)
        calls.append(build.call(net, 100 * step, 100 * step + 90))
    build.step(3, 300, 399)
    build.gradient(calls[1], [1.0])
    data = OneStep(IndexedTables(build.data()), 3)
    assert data.table("steps")["step"].to_pylist() == [3]
    assert data.table("calls")["call_id"].to_pylist() == [calls[1]]
    assert data.table("values")["step"].to_pylist() == [3]
