"""Rows that are taken, read and free again."""

import ctypes
import threading

import numpy as np
import pytest
import torch

from modtrace.measure.moments.cpu_kernel import RawStatistics
from modtrace.measure.moments.rows import FIRST_INDEX, WIDTH, DeviceRows, HostRows


class Numbered:
    """Rows of either kind, written with numbers that tell them apart."""

    def __init__(self, rows):
        self.rows = rows

    def put(self, number: int) -> int:
        statistics = RawStatistics(number, -1.5, 2.5, 1e300, 5e-324, 3, 4)
        if isinstance(self.rows, HostRows):
            return self.rows.put(statistics)
        row = self.rows.take()
        self.rows.row(row)[:FIRST_INDEX].copy_(torch.tensor(statistics, dtype=torch.float64))
        return row

    def read(self, rows) -> list[float]:
        table = self.rows.read(rows)
        assert table.shape == (len(rows), WIDTH)
        np.testing.assert_array_equal(
            table[:, 1:FIRST_INDEX], np.tile([-1.5, 2.5, 1e300, 5e-324, 3, 4], (len(rows), 1))
        )
        return table[:, 0].tolist()


@pytest.fixture(params=[HostRows, lambda: DeviceRows(torch.device("cpu"))], ids=["host", "device"])
def numbered(request):
    return Numbered(request.param())


def test_rows_are_read_in_the_order_asked_for(numbered):
    rows = [numbered.put(number) for number in range(3000)]
    order = np.random.default_rng(0).permutation(3000).tolist()
    assert numbered.read([rows[at] for at in order]) == order
    assert numbered.read([rows[2999], rows[0], rows[2999]]) == [2999, 0, 2999]


@pytest.mark.parametrize("width", [1, WIDTH, 66, 260, 16_384])
def test_rows_of_any_width_lie_apart_and_are_read_as_they_were_written(width):
    rows, written = HostRows(width), []
    while len(rows.blocks) < 3:
        row = rows.take()
        numbers = np.arange(width) + 1000.0 * row
        ctypes.memmove(rows.address(row), numbers.ctypes.data, numbers.nbytes)
        written.append((row, numbers))
    assert rows.blocks[0].nbytes <= 2**19
    numbers, tables = zip(*written, strict=True)
    np.testing.assert_array_equal(rows.read(numbers), tables)


def test_an_interrupt_while_a_block_is_added_moves_no_row(monkeypatch):
    rows = HostRows(1)
    make_block = rows._make_block

    def is_interrupted():
        make_block()
        raise KeyboardInterrupt

    monkeypatch.setattr(rows, "_make_block", is_interrupted)
    with pytest.raises(KeyboardInterrupt):
        rows.take()
    monkeypatch.setattr(rows, "_make_block", make_block)
    for row in [rows.take() for _ in range(1025)]:
        ctypes.c_double.from_address(rows.address(row)).value = row
    assert rows.read(range(1025))[:, 0].tolist() == list(range(1025))


def test_of_no_rows_nothing_is_read(numbered):
    assert numbered.read([]) == []


def test_blocks_are_added_only_when_no_row_is_free(numbered):
    blocks = numbered.rows.blocks
    assert len(blocks) == 0
    rows = [numbered.put(0) for _ in range(1024)]
    assert (len(blocks), sorted(rows)) == (1, list(range(1024)))
    numbered.rows.free(rows[100:900])
    assert {numbered.put(1) for _ in range(800)} == set(rows[100:900])
    assert len(blocks) == 1
    assert numbered.put(2) == 1024
    assert len(blocks) == 2


def test_a_thousand_steps_need_one_block(numbered):
    for step in range(1000):
        rows = [numbered.put(step) for _ in range(10)]
        assert numbered.read(rows) == [step] * 10
        numbered.rows.free(rows)
    assert len(numbered.rows.blocks) == 1


def test_rows_written_since_do_not_change_what_was_read(numbered):
    row = numbered.put(7)
    table = numbered.rows.read([row])
    numbered.rows.free([row])
    assert numbered.put(8) == row
    assert table[0, 0] == 7


def test_no_two_threads_take_the_same_row():
    rows, taken, start = HostRows(), [], threading.Barrier(8)

    def take():
        start.wait()
        for _ in range(2000):
            taken.append(rows.take())

    threads = [threading.Thread(target=take) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(set(taken)) == 16_000
    assert len(rows.blocks) == 16  # 15.6: no thread adds one while there are free rows


def test_device_rows_made_in_inference_mode_can_be_written_outside():
    rows = DeviceRows(torch.device("cpu"))
    with torch.inference_mode():
        first = rows.take()
        rows.row(first).fill_(1)
    second = rows.take()
    rows.row(second).fill_(2)
    assert rows.read([second, first]).tolist() == [[2.0] * WIDTH, [1.0] * WIDTH]
