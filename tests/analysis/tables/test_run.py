"""What ops of a recording read, and the shapes of tensors as columns."""

import pyarrow as pa
import torch
from torch import nn

import modtrace
from modtrace.analysis.tables.run import read_run_tables
from modtrace.analysis.tables.tensors import number_sizes, read_sizes


def test_origin_of_what_is_read_is_behind_views_and_copies_and_not_the_memory_that_they_fill() -> None:
    model = nn.Identity()
    with modtrace.record(model, ops=True, strict=True) as rec, torch.no_grad():
        memory = torch.zeros(4, 3)
        memory.copy_(model(torch.ones(3, 4)).tanh().mT)
        memory.view(12).exp()
    side = read_run_tables(rec.data, [0])
    names = [side.ops.names[code] for code in side.ops.name]
    read = side.flow.reader == names.index("aten.exp.default")
    maker = side.flow.tensors.producer[side.origin_of_read[read]]
    assert [names[each] for each in maker.tolist()] == ["aten.tanh.default"]
    walked = side.walk_views(int(side.flow.read[read][0]))
    assert [names[side.flow.tensors.producer[tensor]] for tensor in walked] == [
        "aten.view.default",
        "aten.copy_.default",
        "aten.transpose.int",
        "aten.tanh.default",
    ]


def test_shapes_of_tables_with_shapes_of_other_lengths_have_equal_numbers() -> None:
    lists = pa.list_(pa.int64())
    one = read_sizes(pa.chunked_array([[[2, 3, 4], [5], []]], lists))
    other = read_sizes(pa.chunked_array([[[5], []]], lists))
    assert one.tolist() == [[2, 3, 4], [5, -1, -1], [-1, -1, -1]]
    numbers, other_numbers = number_sizes(one, other)
    assert numbers[1:].tolist() == other_numbers.tolist()
    assert len({*numbers.tolist()}) == 3
