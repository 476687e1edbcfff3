"""What ops of a recording read."""

import torch
from torch import nn

import modtrace
from modtrace.analysis.tables.run import read_run_tables


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
