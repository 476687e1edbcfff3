"""What ops cost, by module, by call and by name."""

import pytest

from builders import RecordingBuilder, TypedRecording
from helpers.typed_steps import typed_net
from modtrace.analysis.ops.op_table import OpRow, OpTable, build_op_table
from modtrace.analysis.ops.sums import NO_OPS, OpSums, PhaseSums


def training_step() -> TypedRecording:
    """One step of a net with a head that is called twice, its backward, the loss and an optimizer."""
    build, net = typed_net(2_000, argv=("train.py",))
    head = build.module("head", "Linear", parent=net)
    outer = build.call(net, 0, 500, nth=0, allocated_bytes=1_000)
    first = build.call(head, 10, 200, parent=outer, nth=0, allocated_bytes=300)
    second = build.call(head, 210, 400, parent=outer, nth=1, allocated_bytes=400)
    build.op(first, "aten.addmm.default", 20, 120, flops=80, bytes_read=64, bytes_written=16)
    build.op(second, "aten.addmm.default", 220, 270, flops=80, bytes_read=64, bytes_written=16)
    build.op(outer, "aten.relu.default", 410, 430, flops=None, bytes_read=None, bytes_written=16)
    build.op(None, "aten.mean.default", 520, 530)
    backward = build.backward(first, 700, 800, allocated_bytes=40)
    build.op(backward, "aten.mm.default", 710, 750, flops=160)
    build.op(None, "aten.add_.Tensor", 760, 765, phase="backward", accumulation=True)
    optimizer = build.optimizer(900, 1_000)
    build.op(optimizer, "aten._fused_adam_.default", 910, 990, flops=None)
    return build.data()


def times(table: OpTable) -> list[tuple[str, int]]:
    return [(row.name, row.sums.together.time_ns) for row in table.rows]


def row(table: OpTable, name: str) -> OpRow:
    [found] = [each for each in table.rows if each.name == name]
    return found


def test_modules_come_by_the_time_of_their_own_ops() -> None:
    assert times(build_op_table(training_step())) == [
        ("head", 190),
        ("(optimizer)", 80),
        ("Net", 20),
        ("(outside of modules)", 15),
    ]


def test_row_of_a_module_has_its_ops_together_and_by_phase() -> None:
    assert row(build_op_table(training_step()), "head") == OpRow(
        name="head",
        root="Net",
        path="head",
        type="Linear",
        call=None,
        call_step=None,
        share=190 / 305,
        allocated_bytes=740,
        busiest=None,
        busiest_root=None,
        busiest_ns=0,
        sums=PhaseSums(
            together=OpSums(ops=3, time_ns=190, flops=320, bytes_read=128, bytes_written=32),
            forward=OpSums(ops=2, time_ns=150, flops=160, bytes_read=128, bytes_written=32),
            backward=OpSums(ops=1, time_ns=40, flops=160),
        ),
    )


def test_allocated_bytes_of_a_module_are_without_the_calls_inside_it() -> None:
    table = build_op_table(training_step())
    assert row(table, "Net").allocated_bytes == 1_000 - 300 - 400
    assert row(table, "(optimizer)").allocated_bytes is None  # nobody said
    assert row(table, "(outside of modules)").allocated_bytes is None


def test_what_is_not_known_is_counted_and_left_out_of_the_sums() -> None:
    assert row(build_op_table(training_step()), "Net").sums.forward == OpSums(
        ops=1, time_ns=20, flops=0, flops_unknown=1, bytes_read=0, bytes_written=16, bytes_unknown=1
    )


def test_ops_in_no_phase_are_in_the_sums_of_all_phases_together() -> None:
    sums = row(build_op_table(training_step()), "(outside of modules)").sums
    assert sums.together == OpSums(ops=2, time_ns=15)
    assert sums.backward == OpSums(ops=1, time_ns=5)
    assert (sums.forward, sums.recompute, sums.optimizer) == (NO_OPS, NO_OPS, NO_OPS)


def test_sums_of_the_table_are_those_of_all_rows() -> None:
    table = build_op_table(training_step())
    assert table.sums.together == OpSums(
        ops=7,
        time_ns=305,
        flops=320,
        flops_unknown=2,
        bytes_read=128,
        bytes_written=48,
        bytes_unknown=1,
    )
    assert sum(each.share or 0 for each in table.rows) == pytest.approx(1)
    assert (table.command, table.by, table.phase, table.recorded) == (("train.py",), "module", None, True)
    assert table.step is not None and table.step.step == 0


@pytest.mark.parametrize("by", ["module", "op", "call"])
def test_every_op_is_in_exactly_one_row(by: str) -> None:
    table = build_op_table(training_step(), by=by)  # type: ignore[arg-type]
    for field in ("ops", "time_ns", "flops", "bytes_written"):
        in_rows = sum(getattr(each.sums.together, field) for each in table.rows)
        assert in_rows == getattr(table.sums.together, field)


def test_one_phase_alone_leaves_all_other_ops_and_allocations_out() -> None:
    table = build_op_table(training_step(), phase="backward")
    assert times(table) == [("head", 40), ("(outside of modules)", 5)]
    assert row(table, "head").share == 40 / 45
    assert row(table, "head").allocated_bytes == 40


def test_by_call_a_backward_belongs_to_its_forward() -> None:
    table = build_op_table(training_step(), by="call")
    assert times(table) == [
        ("head", 140),
        ("(optimizer)", 80),
        ("head@1", 50),
        ("Net", 20),
        ("(outside of modules)", 15),
    ]
    first = row(table, "head")
    assert (first.path, first.call, first.call_step, first.type) == ("head", 0, 0, "Linear")
    assert (first.sums.forward.time_ns, first.sums.backward.time_ns) == (100, 40)
    assert first.allocated_bytes == 340
    assert row(table, "head@1").call == 1
    assert row(table, "(optimizer)").call is None


def test_by_call_the_backward_of_an_earlier_step_is_told_apart() -> None:
    build, net = typed_net(100)
    early = build.call(net, 0, 50, nth=0)
    build.step(1, 100, 300)
    late = build.call(net, 100, 150, nth=0)
    build.op(late, "aten.mm.default", 110, 120)
    build.op(build.backward(late, 150, 170), "aten.mm.default", 155, 160)
    build.op(build.backward(early, 170, 200), "aten.mm.default", 175, 177)

    table = build_op_table(build.data(), step=1, by="call")
    assert [(each.name, each.call_step, each.sums.together.time_ns) for each in table.rows] == [
        ("Net", 1, 15),
        ("Net", 0, 2),
    ]


def test_by_call_a_recompute_and_the_backward_of_what_it_made_belong_to_the_forward() -> None:
    build, net = typed_net(100)
    forward = build.call(net, 0, 10, nth=0)
    again = build.recompute(forward, 20, 30, nth=0)
    build.op(again, "aten.mm.default", 21, 24)
    build.op(build.backward(again, 30, 40), "aten.mm.default", 31, 33)

    [only] = build_op_table(build.data(), by="call").rows
    assert only.name == "Net"
    assert (only.sums.recompute.time_ns, only.sums.backward.time_ns) == (3, 2)


def test_calls_without_a_number_are_rows_of_their_own() -> None:
    build, net = typed_net(100)
    for start_ns in (0, 50):
        build.op(build.call(net, start_ns, start_ns + 10), "aten.mm.default", start_ns, start_ns + 5)

    rows = build_op_table(build.data(), by="call").rows
    assert [(each.name, each.call, each.sums.together.ops) for each in rows] == [
        ("Net", None, 1),
        ("Net", None, 1),
    ]


def test_by_op_names_are_grouped_and_say_where_most_of_their_time_goes() -> None:
    table = build_op_table(training_step(), by="op")
    assert [(each.name, each.sums.together.ops, each.busiest, each.busiest_ns) for each in table.rows] == [
        ("aten.addmm.default", 2, "head", 150),
        ("aten._fused_adam_.default", 1, "(optimizer)", 80),
        ("aten.mm.default", 1, "head", 40),
        ("aten.relu.default", 1, "Net", 20),
        ("aten.mean.default", 1, "(outside of modules)", 10),
        ("aten.add_.Tensor", 1, "(outside of modules)", 5),
    ]
    first = table.rows[0]
    assert (first.root, first.path, first.type, first.allocated_bytes) == (None, None, None, None)
    assert first.busiest_root == "Net"
    assert first.sums.together.flops == 160


def test_two_roots_of_one_class_are_told_apart() -> None:
    build = RecordingBuilder()
    nets = [build.module("", "Net", name=name) for name in ("Net", "Net#1")]
    heads = [build.module("head", "Linear", parent=net) for net in nets]
    build.step(0, 0, 100)
    for at, head in enumerate(heads):
        build.op(build.call(head, 10 * at, 10 * at + 9), "aten.mm.default", 10 * at, 10 * at + 5 + at)

    rows = build_op_table(build.data()).rows
    assert [(each.root, each.name) for each in rows] == [("Net#1", "head"), ("Net", "head")]


def test_op_of_a_call_that_is_not_in_the_recording_is_marked_as_such() -> None:
    build = RecordingBuilder()
    build.step(0, 0, 100)
    build.op(77, "aten.mm.default", 0, 10, phase="forward")

    for by in ("module", "call"):
        [only] = build_op_table(build.data(), by=by).rows  # type: ignore[arg-type]
        assert (only.name, only.path, only.sums.forward.time_ns) == ("(call not recorded)", None, 10)


def test_op_whose_end_was_not_seen_counts_without_time() -> None:
    build, net = typed_net(100)
    build.op(build.call(net, 0, 10), "aten.mm.default", 0, None, raised=True)

    [only] = build_op_table(build.data()).rows
    assert only.sums.together == OpSums(ops=1, unfinished=1, raised=1)
    assert only.share is None


def test_sums_are_exact_beyond_what_floating_point_holds() -> None:
    build, net = typed_net(100)
    call = build.call(net, 0, 10)
    for flops in (2**53, 1, 1):
        build.op(call, "aten.mm.default", 0, 1, flops=flops)

    assert build_op_table(build.data()).sums.together.flops == 2**53 + 2


def test_the_step_is_the_one_asked_for_or_the_last_complete_one() -> None:
    build, net = typed_net()
    for step in range(2):
        build.step(step, 100 * step, 100 * step + 90)
        build.op(build.call(net, 100 * step, 100 * step + 10), f"aten.op{step}.default", 0, 10)
    build.begin_step(2)
    build.op(build.call(net, 200, 210), "aten.op2.default", 0, 10)

    data = build.data()
    assert [each.name for each in build_op_table(data, by="op").rows] == ["aten.op1.default"]
    assert [each.name for each in build_op_table(data, by="op", step=0).rows] == ["aten.op0.default"]
    with pytest.raises(ValueError, match=r"^no step 7 in this recording; there are: 0\.\.2$"):
        build_op_table(data, step=7)


@pytest.mark.parametrize("by", ["module", "op", "call"])
def test_recording_without_ops_gives_no_rows_and_says_that_none_were_recorded(by: str) -> None:
    build = RecordingBuilder()
    assert build_op_table(build.data(), by=by).rows == ()  # type: ignore[arg-type]
    build.step(0, 0, 100)
    build.call(build.module("", "Net"), 0, 10)

    table = build_op_table(build.data(), by=by)  # type: ignore[arg-type]
    assert (table.rows, table.recorded, table.sums) == ((), False, PhaseSums())


def test_other_groups_and_phases_are_refused() -> None:
    with pytest.raises(ValueError, match=r"^by='type': give one of 'module', 'op', 'call'$"):
        build_op_table(training_step(), by="type")  # type: ignore[arg-type]
    with pytest.raises(
        ValueError, match=r"^no phase 'eval'; there are: forward, backward, recompute, optimizer$"
    ):
        build_op_table(training_step(), phase="eval")
