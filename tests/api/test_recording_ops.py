"""The answers about ops of a recording."""

from builders import RecordingBuilder
from modtrace.api.recording import Recording


def recording() -> Recording:
    build = RecordingBuilder()
    net = build.module("", "Net")
    for step in range(2):
        build.step(step, 100 * step, 100 * step + 90)
        call = build.call(net, 100 * step, 100 * step + 50, nth=0)
        build.op(call, "aten.mm.default", 100 * step, 100 * step + 10 + step, saved_bytes=64)
        build.op(build.backward(call, 60, 80), "aten.mul.Tensor", 61, 62)
    return Recording(build.data())


def test_op_table_is_of_the_step_grouping_and_phase_asked_for() -> None:
    assert [row.name for row in recording().op_table().rows] == ["Net"]
    [row] = recording().op_table(0, by="op", phase="forward").rows
    assert (row.name, row.sums.together.time_ns) == ("aten.mm.default", 10)


def test_memory_table_is_of_the_step_asked_for_and_names_ops_if_told() -> None:
    assert recording().memory_table().saved.saved_bytes == 64
    [row] = recording().memory_table(0, ops=True).rows
    assert [each.op for each in row.ops] == ["aten.mm.default", "aten.mul.Tensor"]


def test_paths_are_of_the_step_and_phase_asked_for() -> None:
    assert recording().paths().modules() == ("",)
    assert [row.op for row in recording().paths(1, phase="backward").rows] == ["aten.mul.Tensor"]
