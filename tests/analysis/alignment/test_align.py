"""Alignments of recordings typed by hand."""

import tracemalloc

import pytest

from builders import RecordingBuilder, TypedRecording
from helpers.typed_steps import begin_net, typed_net
from modtrace.analysis.alignment.align import align
from modtrace.analysis.alignment.contract import Alignment, Unpaired
from modtrace.analysis.tables.placement import ModuleName


def _counts(found: Unpaired) -> tuple[dict[str, int], dict[str, int], dict[str, int]]:
    return found.calls.count(), found.ops.count(), found.values.count()


def _is_whole(found: Alignment) -> bool:
    return all(_counts(each) == ({}, {}, {}) for each in (found.missing, found.extra))


def _small(*, extra_op: bool = False, wrapped: bool = False, times: int = 1) -> TypedRecording:
    build, net, outer = begin_net(1000, 600, nth=0)
    head = build.module("head", "Linear", parent=net)
    inside = build.module("head", "Linear", parent=head, raw_path="head.module") if wrapped else head
    for nth in range(times):
        at = 100 * nth
        inner = build.call(head, at + 10, at + 90, parent=outer, nth=nth)
        if wrapped:
            inner = build.call(inside, at + 20, at + 80, parent=inner, nth=nth)
        if extra_op:
            build.op(inner, "aten.clone.default", at + 25, at + 28)
        build.op(inner, "aten.addmm.default", at + 30, at + 60)
        build.output(inner, [2.0])
    build.op(outer, "aten.relu.default", 510, 520)
    build.output(outer, [0.5])
    build.parameter(head, "weight", [1.0, -1.0])
    return build.data()


def test_recording_is_aligned_with_itself_row_by_row() -> None:
    found = align(_small(), _small())
    assert found.steps.tolist() == [[0, 0]]
    assert found.calls.tolist() == [[0, 0], [1, 1]]
    assert found.ops.tolist() == [[0, 0], [1, 1]]
    assert found.values.tolist() == [[0, 0], [1, 1], [2, 2]]
    assert _is_whole(found)


def test_op_that_only_one_recording_has_is_extra() -> None:
    found = align(_small(), _small(extra_op=True))
    assert found.ops.tolist() == [[0, 1], [1, 2]]
    assert found.extra.ops.rows.tolist() == [0]
    assert _counts(found.extra) == ({}, {"op": 1}, {})
    assert _counts(found.missing) == ({}, {}, {})


def test_wrapper_of_one_recording_is_extra_and_harmless() -> None:
    found = align(_small(), _small(wrapped=True))
    assert found.calls.tolist() == [[0, 0], [1, 2]]
    assert _counts(found.extra) == ({"wrapper": 1}, {}, {})
    assert found.extra.is_harmless


def test_further_call_of_a_module_and_its_ops_and_values_are_extra() -> None:
    found = align(_small(), _small(times=2))
    assert found.calls.tolist() == [[0, 0], [1, 1]]
    assert _counts(found.extra) == ({"call": 1}, {"op": 1}, {"call": 1})
    assert not found.extra.is_harmless


def test_ops_of_a_module_that_the_other_recording_lacks_are_aligned_in_the_call_around() -> None:
    build, _, outer = begin_net(1000, 600, nth=0)
    build.op(outer, "aten.addmm.default", 110, 160)
    build.op(outer, "aten.relu.default", 510, 520)
    found = align(_small(), build.data())
    assert found.ops.tolist() == [[0, 0], [1, 1]]
    assert found.missing.modules == (ModuleName("Net", "head", "Linear"),)
    assert _counts(found.missing) == ({"module": 1}, {}, {"module": 2, "site": 1})


def test_step_that_the_other_recording_lacks_is_missing() -> None:
    build, net = typed_net()
    for step in (0, 1):
        build.step(step, 1000 * step, 1000 * step + 900)
        build.output(build.call(net, 1000 * step, 1000 * step + 600, nth=0), [1.0])
    both = build.data()
    one = RecordingBuilder()
    net = one.module("", "Net")
    one.step(1, 0, 900)
    one.output(one.call(net, 0, 600, nth=0), [1.0])
    found = align(both, one.data())
    assert found.steps.tolist() == [[1, 1]]
    assert found.values.tolist() == [[1, 0]]
    assert _counts(found.missing) == ({"step": 1}, {}, {"step": 1})


def test_two_steps_of_one_recording_are_aligned() -> None:
    build, net = typed_net()
    for step in (0, 1, 2):
        build.step(step, 1000 * step, 1000 * step + 900)
        build.output(build.call(net, 1000 * step, 1000 * step + 600, nth=0), [1.0])
    data = build.data()
    found = align(data, data, step=0, step_b=-1)
    assert found.steps.tolist() == [[0, 2]]
    assert found.values.tolist() == [[0, 2]]
    assert _is_whole(found)


def test_memory_is_in_proportion_to_calls_and_not_to_calls_times_names_of_ops() -> None:
    build, net, outer = begin_net(10**7, 10**6, nth=0)
    count = 1000
    for number in range(count):
        module = build.module(f"layer{number}", "Linear", parent=net)
        forward = build.call(module, 100 * number, 100 * number + 90, parent=outer, nth=0)
        again = build.recompute(forward, 10**6 + 100 * number, 10**6 + 100 * number + 90, nth=0)
        for call in (forward, again):
            build.op(call, f"mine.op{number}.default", 100 * number + 10, 100 * number + 20)
    build.output(forward, [1.0])
    build.output(again, [1.0])
    data = build.data()
    tracemalloc.start()
    align(data, data)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 5 * count**2  # a table of 8 bytes for each pair of them


def test_recompute_of_one_recording_alone_is_paired_with_its_own_forward() -> None:
    def run(recomputed: bool) -> TypedRecording:
        build, net = typed_net(1000)
        forward = build.call(net, 0, 100, nth=0)
        build.op(forward, "aten.mm.default", 10, 20)
        build.output(forward, [1.0])
        if recomputed:
            again = build.recompute(forward, 200, 300, nth=0)
            build.op(again, "aten.mm.default", 210, 220)
            build.output(again, [1.0])
        return build.data()

    found = align(run(False), run(True))
    assert found.values.tolist() == [[0, 0]]
    assert found.extra.recomputed.tolist() == [[1, 0]]
    assert found.missing.recomputed.tolist() == []
    assert _counts(found.extra) == ({"recompute": 1}, {"recompute": 1}, {"recompute": 1})
    assert found.extra.is_harmless


@pytest.mark.parametrize("whole_in_a", [False, True])
def test_micro_batches_are_parts_of_the_batch_of_the_other_recording(whole_in_a: bool) -> None:
    def run(batches: int) -> TypedRecording:
        build, net = typed_net(1000)
        for nth in range(batches):
            call = build.call(net, 100 * nth, 100 * nth + 50, nth=nth)
            build.output(call, [1.0] * (12 // batches))
        return build.data()

    one, other = (run(1), run(3)) if whole_in_a else (run(3), run(1))
    found = align(one, other)
    assert found.joined.part.tolist() == [0, 1, 2]
    assert found.joined.whole.tolist() == [0, 0, 0]
    assert found.joined.whole_in_a.tolist() == [whole_in_a] * 3
    assert found.joined.dimension.tolist() == [0, 0, 0]
    assert found.joined.offset.tolist() == [0, 4, 8]
    assert len(found.values) == 0
    assert found.missing.is_harmless and found.extra.is_harmless


def test_ops_of_a_module_that_the_other_recording_never_calls_are_aligned_in_the_call_around() -> None:
    build, net = typed_net()
    build.module("head", "Linear", parent=net)
    build.step(0, 0, 1000)
    outer = build.call(net, 0, 600, nth=0)
    build.op(outer, "aten.addmm.default", 110, 160)
    build.op(outer, "aten.relu.default", 510, 520)
    assert align(_small(), build.data()).ops.tolist() == [[0, 0], [1, 1]]


def test_training_steps_are_paired_where_one_run_evaluates_in_between() -> None:
    def run(*kinds: str) -> TypedRecording:
        build, net = typed_net()
        for step, kind in enumerate(kinds):
            build.step(step, 1000 * step, 1000 * step + 900, kind=kind)
            build.output(build.call(net, 1000 * step, 1000 * step + 600, nth=0), [1.0])
        return build.data()

    found = align(run("train", "eval", "train"), run("train", "train"))
    assert found.steps.tolist() == [[0, 0], [2, 1]]
    assert _counts(found.missing) == ({"step": 1}, {}, {"step": 1})


def test_slots_of_other_names_are_paired_by_shape() -> None:
    def run(*outputs: tuple[str, tuple[int, ...]]) -> TypedRecording:
        build, net = typed_net(1000)
        call = build.call(net, 0, 600, nth=0)
        for slot, shape in outputs:
            build.output(call, None, slot, shape=shape, dtype="float32")
        return build.data()

    found = align(run(("[0]", (2, 3)), ("[1]", (5,))), run((".cache", (5,)), (".logits", (3, 2))))
    assert found.values.tolist() == [[0, 1], [1, 0]]
    assert [found.axes[code] if code >= 0 else None for code in found.permuted.tolist()] == [(1, 0), None]


def test_parameter_is_paired_in_whichever_phase_it_was_measured() -> None:
    def run(*phases: str) -> TypedRecording:
        build, net = typed_net(1000)
        build.call(net, 0, 600, nth=0)
        for phase in phases:
            build.value(build.site(net, "parameter", "weight"), [1.0], phase=phase)
        return build.data()

    assert align(run("forward"), run("optimizer")).values.tolist() == [[0, 0]]
    found = align(run("forward", "optimizer"), run("optimizer"))
    assert found.values.tolist() == [[1, 0]]
    assert _counts(found.missing) == ({}, {}, {"again": 1})


def test_ops_of_optimizers_that_run_others_have_no_partner() -> None:
    def run(*names: str) -> TypedRecording:
        build, net = typed_net(1000)
        build.call(net, 0, 100, nth=0)
        call = build.optimizer(200, 900)
        for at, name in enumerate(names):
            build.op(call, f"aten.{name}.default", 210 + at, 211 + at)
        return build.data()

    assert len(align(run("mul_", "add_"), run("mul_", "add_")).ops) == 2
    found = align(run("mul_", "add_"), run("mul_", "mul_", "add_"))
    assert len(found.ops) == 0
    assert _counts(found.extra) == ({}, {"optimizer": 3}, {})
    assert found.extra.is_harmless


def test_ops_beside_kernels_of_compiled_code_have_partners_only_in_compiled_calls() -> None:
    def run(*, compiled: bool) -> TypedRecording:
        build, net = typed_net(100)
        head = build.module("head", "Linear", parent=net)
        outer = build.call(net, 0, 50, compiled=compiled)
        inner = outer if compiled else build.call(head, 10, 40, parent=outer)
        build.op(inner, "aten.mm.out" if compiled else "aten.mm.default", 11, 12)
        build.op(None, "aten.mul.Tensor", 60, 61)
        return build.data()

    assert align(run(compiled=False), run(compiled=True)).ops.tolist() == [[1, 1]]
    assert align(run(compiled=True), run(compiled=True)).ops.tolist() == [[0, 0], [1, 1]]
