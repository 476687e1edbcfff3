"""The parts of a cycle are what its loop spends, and together they are the cycle to the nanosecond."""

from collections.abc import Callable

import numpy as np
import pytest

from builders import RecordingBuilder, TypedRecording
from helpers.timed_loops import (
    LOOPS,
    Clock,
    Planted,
    Run,
    clock,
    from_a_loader,
    run_loop,
    with_a_closure,
    with_lbfgs,
)
from modtrace.analysis.modules.module_tree import build_module_tree
from modtrace.analysis.tables.cycles import PARTS, Cycles, read_cycles, summarize_cycles
from modtrace.analysis.tables.sampled_steps import SampledSteps

__all__ = ["clock"]


class _AllSteps(SampledSteps):
    """All training steps, the first ones included."""

    numbers = property(lambda self: self.training)  # type: ignore[assignment]


def _parts_of(cycles: Cycles, number: int) -> dict[str, int]:
    return {part: int(cycles.parts_ns[part][number]) for part in PARTS if cycles.parts_ns[part][number]}


@pytest.mark.parametrize("options", [{"values": None}, {"values": None, "steps": "1:"}], ids=["all", "some"])
@pytest.mark.parametrize("loop", LOOPS, ids=lambda loop: loop.__name__)
def test_a_cycle_is_what_its_loop_spends(
    loop: Callable[[Run], Planted], options: dict[str, object], clock: Clock, fresh_dynamo: None
) -> None:
    rec, planted = run_loop(loop, clock, **options)
    cycles = read_cycles(_AllSteps(rec))
    assert len(cycles.step) >= 3
    assert (sum(cycles.parts_ns[part] for part in PARTS) == cycles.length_ns).all()
    length_ns = sum(planted.values()) * 1_000_000
    names = {"between": "between steps"}
    for number in range(len(cycles.step))[1:-1]:
        found = _parts_of(cycles, number)
        for part in PARTS:
            wanted = sum(ms * 1_000_000 for name, ms in planted.items() if names.get(name, name) == part)
            assert abs(found.get(part, 0) - wanted) < length_ns / 100, (part, found)


def test_measuring_is_a_part_of_its_own() -> None:
    build = RecordingBuilder()
    model = build.module("", "Net")
    build.step(0, 0, 700, overhead_ns=100)
    build.call(model, 100, 300, overhead_ns=30)
    build.interval("backward", 300, 600, overhead_ns=60)
    build.interval("data", 700, 900)
    build.interval("writing", 900, 1000)
    build.step(1, 1000, 1700)
    cycles = read_cycles(_AllSteps(build.data()))
    assert cycles.step.tolist() == [0]
    assert _parts_of(cycles, 0) == {
        "data": 200, "forward": 170, "backward": 240, "measuring": 100 + 100, "rest": 190
    }  # fmt: skip


def _typed(parts: list[tuple[int, int]]) -> TypedRecording:
    """A recording with one cycle for each pair: how long it waits for data, and its forward."""
    build, now_ns = RecordingBuilder(), 0
    model = build.module("", "Net")
    for step, (data_ns, forward_ns) in enumerate([*parts, (0, 1)]):
        build.step(step, now_ns, now_ns + forward_ns)
        build.call(model, now_ns, now_ns + forward_ns)
        now_ns += forward_ns + data_ns
        build.interval("data", now_ns - data_ns, now_ns)
    return build.data()


def test_long_waits_once_in_a_while_count_and_one_of_twenty_does_not() -> None:
    bursts = summarize_cycles(_AllSteps(_typed([(0, 10), (0, 10), (0, 10), (40, 10)] * 5)))
    assert bursts is not None
    assert (bursts.cycles, bursts.parts_ns) == (19, {"data": 4 * 40 // 19, "forward": 10})
    once = summarize_cycles(_AllSteps(_typed([(0, 10)] * 19 + [(5000, 10)])))
    assert once is not None
    assert (once.cycles, once.cycle_ns, once.parts_ns) == (19, 10, {"forward": 10})


def test_a_copy_is_from_the_cpu_to_a_device() -> None:
    build = RecordingBuilder()
    build.module("", "Net")
    build.step(0, 0, 100)
    build.interval("backward", 50, 100)
    for start_ns, name, source, target in (
        (0, "aten._to_copy.default", "cpu", "cuda:0"),
        (10, "aten._to_copy.default", "cuda:0", "cpu"),
        (20, "aten._to_copy.default", "cpu", "cpu"),
        (30, "aten.mul.Tensor", "cpu", "cuda:0"),
        (60, "aten.copy_.default", "cpu", "cuda:0"),
    ):
        op = build.op(None, name, start_ns, start_ns + 5)
        build.use(build.tensor([2], device=source), op=op)
        build.tensor([2], producer=op, device=target)
    build.step(1, 200, 300)
    cycles = read_cycles(_AllSteps(build.data()))
    assert _parts_of(cycles, 0) == {"copy": 10, "backward": 45, "rest": 45, "between steps": 100}


def test_an_old_recording_has_no_cycles() -> None:
    build = RecordingBuilder()
    model = build.module("", "Net")
    for step in range(3):
        build.step(step, 100 * step, 100 * step + 90)
        build.call(model, 100 * step, 100 * step + 50)
    run = _AllSteps(build.data())
    assert summarize_cycles(run) is None
    assert np.array_equal(read_cycles(run).length_ns, [])


def test_the_slowest_module_is_that_with_the_most_time_of_its_own() -> None:
    build = RecordingBuilder()
    model = build.module("", "Net")
    first, second = (build.module(path, "Linear", parent=model) for path in ("first", "second"))
    for step in range(2):
        build.step(step, 1000 * step, 1000 * step + 900)
        outer = build.call(model, 1000 * step, 1000 * step + 800)
        build.call(first, 1000 * step, 1000 * step + 300, parent=outer)
        build.call(second, 1000 * step + 300, 1000 * step + 700, parent=outer, overhead_ns=150)
        build.interval("backward", 1000 * step + 800, 1000 * step + 850)
    found = summarize_cycles(_AllSteps(build.data()))
    assert found is not None
    assert (found.slowest, found.slowest_ns) == ("first", 300)


@pytest.mark.parametrize("loop", [with_lbfgs, with_a_closure, from_a_loader], ids=lambda loop: loop.__name__)
def test_an_optimizers_own_time_is_without_its_closure(loop: Callable[[Run], Planted], clock: Clock) -> None:
    rec, planted = run_loop(loop, clock, values=None)
    tree = build_module_tree(rec, step=2)
    assert abs(tree.optimizer.self_ns - planted["optimizer"] * 1_000_000) < 100_000
    cycles = build_module_tree(rec).cycles
    assert cycles is not None
    assert cycles.cycle_ns // 1_000_000 == sum(planted.values())
