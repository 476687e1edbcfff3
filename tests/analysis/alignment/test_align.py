"""Alignments of recordings typed by hand."""

from builders import RecordingBuilder, TypedRecording
from modtrace.analysis.alignment.align import align


def _small(*, extra_op: bool = False) -> TypedRecording:
    build = RecordingBuilder()
    net = build.module("", "Net")
    head = build.module("head", "Linear", parent=net)
    build.step(0, 0, 1000)
    outer = build.call(net, 0, 600, nth=0)
    inner = build.call(head, 100, 500, parent=outer, nth=0)
    if extra_op:
        build.op(inner, "aten.clone.default", 105, 108)
    build.op(inner, "aten.addmm.default", 110, 160)
    build.op(outer, "aten.relu.default", 510, 520)
    build.output(inner, [2.0])
    build.output(outer, [0.5])
    build.parameter(head, "weight", [1.0, -1.0])
    return build.data()


def test_recording_is_aligned_with_itself_row_by_row() -> None:
    found = align(_small(), _small())
    assert found.steps.tolist() == [[0, 0]]
    assert found.calls.tolist() == [[0, 0], [1, 1]]
    assert found.ops.tolist() == [[0, 0], [1, 1]]
    assert found.values.tolist() == [[0, 0], [1, 1], [2, 2]]
    assert found.missing.calls.count() == found.missing.ops.count() == found.missing.values.count() == {}
    assert found.extra.calls.count() == found.extra.ops.count() == found.extra.values.count() == {}


def test_op_that_only_one_recording_has_is_extra() -> None:
    found = align(_small(), _small(extra_op=True))
    assert found.ops.tolist() == [[0, 1], [1, 2]]
    assert found.extra.ops.rows.tolist() == [0]
    assert found.extra.ops.count() == {"op": 1}
    assert len(found.missing.ops) == 0
