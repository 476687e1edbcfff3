"""How far apart what ops read is, where what is between was not measured."""

import numpy as np

from builders import RecordingBuilder
from modtrace.analysis.divergence.op_inputs import find_op_inputs
from modtrace.analysis.tables.run import read_run_tables


def test_long_way_through_what_was_not_measured_does_not_hide_a_short_one_beside_it() -> None:
    """A hundred ops in a row read what is known; another one reads that and what was not compared."""
    build = RecordingBuilder()
    net = build.module("", "Net")
    build.step(0, 0, 1000)
    call = build.call(net, 0, 999, nth=0)
    source = build.op(call, "aten.mm.default", 1, 2)
    known, unknown = build.tensor([2], producer=source), build.tensor([2])
    last = known
    for at in range(100):
        op = build.op(call, "aten.sin.default", 10 + 2 * at, 11 + 2 * at)
        build.use(last, op=op)
        last = build.tensor([2], producer=op)
    mixed, reader = (
        build.op(call, name, at, at + 1) for name, at in (("aten.mul.Tensor", 300), ("aten.exp.default", 302))
    )
    for tensor, slot in ((known, "self"), (unknown, "other")):
        build.use(tensor, op=mixed, slot=slot)
    build.use(build.tensor([2], producer=mixed), op=reader)
    side = read_run_tables(build.data(), [0])
    flow = side.flow
    of_tensor = np.where(flow.tensors.producer == 0, 0.5, np.nan)
    found = find_op_inputs(flow, np.zeros(len(flow.op_id), bool), of_tensor, np.full(len(flow.read), np.nan))
    assert found.error[-1] == 0.5 and found.is_partial[-1] and not found.is_known[-2]
