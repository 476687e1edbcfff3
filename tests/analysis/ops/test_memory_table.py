"""What modules save for backward and what their calls allocate."""

import pytest

from builders import RecordingBuilder, TypedRecording
from helpers.typed_steps import typed_net
from modtrace.analysis.ops.memory_table import CallMemory, MemoryRow, MemoryTable, build_memory_table
from modtrace.analysis.ops.sums import BY_NO_OP, SavedByOp, SavedMemory


def training_step() -> TypedRecording:
    """A net of two blocks in a list, the second of which is recomputed, and a loss outside."""
    build, net = typed_net(1_000, argv=("train.py",))
    blocks = build.module("blocks", "ModuleList", parent=net)
    kept, again = (build.module(f"blocks.{at}", "Block", parent=blocks) for at in range(2))
    outer = build.call(net, 0, 300, nth=0, allocated_bytes=900, peak_bytes=5_000)
    first = build.call(kept, 10, 100, parent=outer, nth=0, allocated_bytes=300, peak_bytes=2_000)
    build.op(first, "aten.addmm.default", 20, 30, saved_bytes=100)
    build.op(first, "aten.addmm.default", 30, 40, saved_bytes=20)
    build.op(first, "aten.gelu.default", 40, 50, saved_bytes=40)
    build.op(first, "aten.view.default", 50, 55, saved_bytes=None)
    second = build.call(again, 110, 200, parent=outer, nth=0, allocated_bytes=None, peak_bytes=2_500)
    build.op(second, "aten.addmm.default", 120, 130)
    build.op(outer, "aten.add.Tensor", 210, 220, saved_bytes=8)
    build.op(None, "aten.mean.default", 310, 320, saved_bytes=32)
    recompute = build.recompute(second, 400, 450, nth=0, allocated_bytes=200, peak_bytes=2_600)
    build.op(recompute, "aten.addmm.default", 410, 420, saved_bytes=100)
    build.backward(second, 450, 500, allocated_bytes=50, peak_bytes=6_000)
    build.optimizer(600, 700, allocated_bytes=10, peak_bytes=3_000)
    return build.data()


def row(table: MemoryTable, name: str) -> MemoryRow:
    [found] = [each for each in table.rows if each.name == name]
    return found


def test_modules_come_by_what_their_own_ops_save() -> None:
    table = build_memory_table(training_step())
    assert [(each.name, each.saved.saved_bytes, each.saved.recompute_bytes) for each in table.rows] == [
        ("blocks.0", 160, 0),
        ("(outside of modules)", 32, 0),
        ("Net", 8, 0),
        ("blocks.1", 0, 100),
        ("(optimizer)", 0, 0),
    ]


def test_row_of_a_module_has_savings_and_the_memory_of_its_calls() -> None:
    assert row(build_memory_table(training_step()), "blocks.0") == MemoryRow(
        name="blocks.0",
        root="Net",
        path="blocks.0",
        type="Block",
        saved=SavedMemory(ops=4, saved_bytes=160, unknown=1),
        saved_inside=SavedMemory(ops=4, saved_bytes=160, unknown=1),
        share=0.8,
        forward=CallMemory(calls=1, allocated_bytes=300, peak_bytes=2_000),
    )


def test_what_is_saved_inside_a_module_is_counted_beside_its_own() -> None:
    net = row(build_memory_table(training_step()), "Net")
    assert net.saved == SavedMemory(ops=1, saved_bytes=8)
    assert net.saved_inside == SavedMemory(ops=7, saved_bytes=168, recompute_bytes=100, unknown=1)


def test_totals_are_of_the_whole_step() -> None:
    table = build_memory_table(training_step())
    assert table.saved == SavedMemory(ops=8, saved_bytes=200, recompute_bytes=100, unknown=1)
    assert table.peak_bytes == 6_000
    assert (table.command, table.recorded) == (("train.py",), True)


def test_memory_of_calls_is_told_by_phase() -> None:
    table = build_memory_table(training_step())
    block = row(table, "blocks.1")
    assert block.forward == CallMemory(calls=1, allocated_bytes=None, peak_bytes=2_500)
    assert block.recompute == CallMemory(calls=1, allocated_bytes=200, peak_bytes=2_600)
    assert block.phase("backward") == CallMemory(calls=1, allocated_bytes=50, peak_bytes=6_000)
    optimizer = row(table, "(optimizer)")
    assert optimizer.optimizer == CallMemory(calls=1, allocated_bytes=10, peak_bytes=3_000)


def test_of_several_calls_the_largest_is_shown() -> None:
    build, net = typed_net(100)
    build.call(net, 0, 10, nth=0, allocated_bytes=5, peak_bytes=70)
    build.call(net, 20, 30, nth=1, allocated_bytes=9, peak_bytes=60)

    [only] = build_memory_table(build.data()).rows
    assert only.forward == CallMemory(calls=2, allocated_bytes=9, peak_bytes=70)


def test_ops_are_named_where_asked_for_the_largest_first() -> None:
    data = training_step()
    assert row(build_memory_table(data), "blocks.0").ops == ()
    assert row(build_memory_table(data, ops=True), "blocks.0").ops == (
        SavedByOp("aten.addmm.default", SavedMemory(ops=2, saved_bytes=120)),
        SavedByOp("aten.gelu.default", SavedMemory(ops=1, saved_bytes=40)),
        SavedByOp("aten.view.default", SavedMemory(ops=1, unknown=1)),
    )
    assert row(build_memory_table(data, ops=True), "(outside of modules)").ops == (
        SavedByOp("aten.mean.default", SavedMemory(ops=1, saved_bytes=32)),
    )


def test_module_called_inside_itself_counts_once() -> None:
    build, net = typed_net(100)
    tree = build.module("tree", "Tree", parent=net)
    outer = build.call(tree, 10, 50, parent=build.call(net, 0, 60))
    build.op(build.call(tree, 20, 40, parent=outer), "aten.mm.default", 21, 22, saved_bytes=64)

    table = build_memory_table(build.data())
    assert row(table, "tree").saved_inside.saved_bytes == 64
    assert row(table, "Net").saved_inside.saved_bytes == 64


def test_shares_are_none_where_nothing_is_saved() -> None:
    build = RecordingBuilder()
    build.step(0, 0, 100)
    build.op(build.call(build.module("", "Net"), 0, 10), "aten.mm.default", 0, 5)

    assert [each.share for each in build_memory_table(build.data()).rows] == [None]


def test_recording_without_ops_says_so() -> None:
    build = RecordingBuilder()
    empty = build_memory_table(build.data())
    assert (empty.rows, empty.recorded, empty.peak_bytes) == ((), False, None)
    build.step(0, 0, 100)
    build.call(build.module("", "Net"), 0, 10)
    assert not build_memory_table(build.data()).recorded


def test_step_that_does_not_exist_is_refused() -> None:
    with pytest.raises(ValueError, match=r"^no step 3 in this recording; there are: 0$"):
        build_memory_table(training_step(), step=3)


def test_what_a_call_saves_beside_its_ops_is_its_own() -> None:
    build, net = typed_net(100)
    block = build.module("block", "Block", parent=net)
    outer = build.call(net, 0, 60, saved_bytes=108)
    region = build.call(block, 10, 50, parent=outer, compiled=True, saved_bytes=100)
    build.op(region, "aten.detach.default", 11, 12, saved_bytes=0)
    build.op(outer, "aten.mul.Tensor", 51, 52, saved_bytes=8)

    table = build_memory_table(build.data(), ops=True)
    saved = row(table, "block")
    assert saved.saved == SavedMemory(ops=1, saved_bytes=100)
    assert SavedByOp(BY_NO_OP, SavedMemory(saved_bytes=100)) in saved.ops
    assert row(table, "Net").saved == SavedMemory(ops=1, saved_bytes=8)
    assert row(table, "Net").saved_inside == SavedMemory(ops=2, saved_bytes=108)
    assert table.saved == SavedMemory(ops=2, saved_bytes=108)


def test_memory_of_compiled_code_is_unknown_where_nothing_tells_it() -> None:
    build, net = typed_net(100)
    block = build.module("block", "Block", parent=net)
    outer = build.call(net, 0, 60, allocated_bytes=8, peak_bytes=8)
    region = build.call(block, 10, 50, parent=outer, compiled=True, allocated_bytes=0, peak_bytes=0)
    build.op(outer, "aten.mul.Tensor", 51, 52, saved_bytes=8)
    build.backward(region, 70, 80, allocated_bytes=0, peak_bytes=0)

    table = build_memory_table(build.data())
    unknown = CallMemory(calls=1)
    assert row(table, "block").saved == SavedMemory(unknown=1)
    assert row(table, "block").forward == row(table, "block").backward == row(table, "Net").forward == unknown
