"""The columns that the tables of ops are made of."""

import numpy as np
import pyarrow as pa

from builders import RecordingBuilder
from modtrace.analysis.tables.columns import dictionary_codes
from modtrace.analysis.tables.ops import has_ops, read_step_ops


def test_words_of_chunks_with_dictionaries_of_their_own_get_one_code_each() -> None:
    chunks = [pa.array(words).dictionary_encode() for words in (["mm", "add"], ["add", None, "relu"])]
    codes, words = dictionary_codes(pa.chunked_array(chunks))
    assert codes.tolist() == [0, 1, 1, -1, 2]
    assert words == ("mm", "add", "relu")


def test_no_words_are_no_codes() -> None:
    codes, words = dictionary_codes(pa.chunked_array([], pa.dictionary(pa.int32(), pa.string())))
    assert (codes.tolist(), words) == ([], ())


def test_what_is_not_known_is_minus_one_and_an_end_that_was_not_seen_no_time() -> None:
    build = RecordingBuilder()
    build.step(0, 0, 100)
    call = build.call(build.module("", "Net"), 0, 10)
    build.op(call, "aten.mm.default", 3, None, flops=None, bytes_read=None, saved_bytes=None)
    build.op(None, "aten.add.Tensor", 20, 24, flops=7)

    ops = read_step_ops(build.data(), step=None)
    assert (ops.flops.tolist(), ops.bytes_read.tolist(), ops.saved_bytes.tolist()) == (
        [-1, 7],
        [-1, 0],
        [-1, 0],
    )
    assert (ops.duration_ns.tolist(), ops.ended.tolist()) == ([0, 4], [False, True])
    assert (ops.call.tolist(), ops.where.tolist(), ops.phase.tolist()) == ([0, -1], [0, -1], [0, -1])


def test_only_the_ops_of_the_step_are_read() -> None:
    build = RecordingBuilder()
    for step in range(3):
        build.step(step, 100 * step, 100 * step + 50)
        build.op(None, "aten.mm.default", 100 * step, 100 * step + 1)

    assert np.array_equal(read_step_ops(build.data(), step=1).op_id, [1])


def test_ops_are_there_or_not() -> None:
    build = RecordingBuilder()
    assert not has_ops(build.data())
    build.op(None, "aten.mm.default", 0, 1)
    assert has_ops(build.data())
