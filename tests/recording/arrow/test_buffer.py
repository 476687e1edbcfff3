"""Small batches become one, in the order they came."""

import numpy as np
import pytest

from modtrace.recording.arrow.buffer import TableBuffer


def test_rows_are_taken_as_one_batch() -> None:
    buffer = TableBuffer("scalars")
    buffer.append({"step": [0], "name": ["loss"], "value": [2.0]})
    buffer.append({"step": [1, 1], "name": ["lr", "loss"], "value": [0.1, 1.0]})
    assert buffer.rows == 3
    assert buffer.take().to_pylist() == [
        {"step": 0, "name": "loss", "value": 2.0},
        {"step": 1, "name": "lr", "value": 0.1},
        {"step": 1, "name": "loss", "value": 1.0},
    ]
    assert (buffer.rows, buffer.size_bytes, buffer.entries) == (0, 0, 2)


def test_order_stays_over_many_small_batches() -> None:
    buffer = TableBuffer("scalars")
    for step in range(5_000):
        buffer.append({"step": [step]})
        if step % 1666 == 0:
            buffer.peek()
    assert buffer.take().column("step").to_pylist() == list(range(5_000))


def test_row_is_copied_a_few_times_only(monkeypatch: pytest.MonkeyPatch) -> None:
    copied = []
    join = TableBuffer._join

    def counted(self, batches):  # type: ignore[no-untyped-def]
        copied.append(sum(each.num_rows for each in batches))
        return join(self, batches)

    monkeypatch.setattr(TableBuffer, "_join", counted)
    buffer = TableBuffer("steps")
    for step in range(64 * 64):
        buffer.append({"step": [step], "kind": ["train"]})
    buffer.take()
    assert sum(copied) == 3 * 64 * 64  # once at each of two levels, once when taken


def test_batches_of_different_columns_are_joined() -> None:
    buffer = TableBuffer("uses")
    buffer.append({"tensor_id": [1], "consumer_op": [7]})
    buffer.append({"slot": ["[0]"], "tensor_id": [2]})
    buffer.append({"tensor_id": [3], "consumer_call": [9]})
    assert buffer.take().to_pylist() == [
        {"consumer_op": 7, "consumer_call": None, "slot": "", "tensor_id": 1},
        {"consumer_op": None, "consumer_call": None, "slot": "[0]", "tensor_id": 2},
        {"consumer_op": None, "consumer_call": 9, "slot": "", "tensor_id": 3},
    ]


def test_words_that_were_not_given_are_null_or_empty_among_those_that_were() -> None:
    buffer = TableBuffer("ops")
    buffer.append({"op_id": [0], "name": ["aten.mm"], "source": ["x.py:1"], "phase": ["backward"]})
    buffer.append({"op_id": [1], "raised": [True]})
    rows = buffer.take().select(["op_id", "phase", "name", "args", "source", "raised"]).to_pylist()
    assert rows == [
        {"op_id": 0, "phase": "backward", "name": "aten.mm", "args": "", "source": "x.py:1", "raised": False},
        {"op_id": 1, "phase": None, "name": "", "args": "", "source": None, "raised": True},
    ]


def test_size_is_that_of_the_columns_that_were_given() -> None:
    buffer = TableBuffer("calls")
    for at in range(100):
        buffer.append({"call_id": np.arange(64) + at, "phase": np.zeros(64, np.int8)})
    assert buffer.size_bytes == 100 * 64 * (8 + 1)
    buffer.peek()
    assert buffer.size_bytes == 100 * 64 * (8 + 1)
    buffer.append({"call_id": [1], "phase": [0], "flops": [1]})
    buffer.peek()
    assert buffer.size_bytes == 6401 * (8 + 1 + 8) + 801  # one bit a row says that flops is null


def test_batch_that_does_not_fit_adds_nothing() -> None:
    buffer = TableBuffer("scalars")
    with pytest.raises(ValueError):
        buffer.append({"step": ["one"]})
    assert buffer.rows == 0


def test_words_that_were_forgotten_get_new_codes() -> None:
    buffer = TableBuffer("scalars")
    buffer.append({"name": ["loss"]})
    buffer.take()
    buffer.forget_dictionaries()
    buffer.append({"name": ["lr"]})
    assert buffer.take().column("name").dictionary.to_pylist() == ["lr"]
