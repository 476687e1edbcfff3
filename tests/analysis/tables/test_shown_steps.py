"""Medians over steps: which steps they are of, and that they are the medians of what each step shows alone."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import modtrace
from builders import RecordingBuilder
from modtrace.analysis.modules.module_tree import MODULE_PHASES, ModuleTree, build_module_tree, iterate_nodes
from modtrace.analysis.ops.groups import GROUPED_BY, GroupedBy
from modtrace.analysis.ops.memory_table import build_memory_table
from modtrace.analysis.ops.op_table import build_op_table
from modtrace.analysis.tables.shown_steps import choose_steps
from modtrace.recording.phase import PHASES


class Experts(nn.Module):
    """One of three experts is called, a different number of times in each step."""

    def __init__(self) -> None:
        super().__init__()
        self.step = 0
        self.experts = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        self.step += 1
        for _ in range(1 + self.step % 2):
            x = self.experts[self.step % 3](x)
        return x


class Checkpointed(nn.Module):
    """Two blocks with a shared layer, which are computed again in backward."""

    def __init__(self) -> None:
        super().__init__()
        shared = nn.Linear(8, 8)
        self.blocks = nn.ModuleList(nn.Sequential(shared, nn.GELU()) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False)
        return x


class Sometimes(nn.Module):
    """A container that is called itself in every other step, and its layers alone in the others."""

    def __init__(self) -> None:
        super().__init__()
        self.step = 0
        self.inner = nn.Sequential(nn.Linear(8, 8), nn.ReLU())

    def forward(self, x: Tensor) -> Tensor:
        self.step += 1
        if self.step % 2:
            return self.inner(x)
        for layer in self.inner:
            x = layer(x)
        return x


def plain() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8))


MODELS: list[Callable[[], nn.Module]] = [plain, Experts, Checkpointed, Sometimes]


def train(model: nn.Module, steps: int = 9, **options: Any) -> modtrace.Recording:
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    with modtrace.record(model, strict=True, **options) as recording:
        for _ in range(steps):
            optimizer.zero_grad()
            model(torch.randn(4, 8)).square().mean().backward()
            optimizer.step()
    return recording


def totals(tree: ModuleTree) -> dict[tuple[str, str], tuple[int, int, int, float]]:
    """The calls, times and share of each module by path and phase."""
    return {
        (node.path, phase): (times.calls, times.total_ns, times.self_ns, times.share or 0.0)
        for _, node in iterate_nodes(tree.roots)
        for phase in MODULE_PHASES
        if (times := node.phase(phase)) != type(times)()
    }


def medians_of(single: list[dict[Any, tuple[float, ...]]]) -> dict[Any, Any]:
    """The medians of numbers by key, over those dictionaries that have the key."""
    keys = dict.fromkeys(key for numbers in single for key in numbers)
    return {
        key: pytest.approx(
            np.median([numbers[key] for numbers in single if key in numbers], axis=0), abs=0.51, rel=1e-9
        )
        for key in keys
    }


@pytest.mark.parametrize("model", MODELS)
def test_tree_has_the_medians_of_the_trees_of_its_steps(model: Callable[[], nn.Module]) -> None:
    data = train(model(), backward_times=True).data
    tree = build_module_tree(data)
    assert tree.step is not None and tree.step.sample is not None
    assert tree.step.sample.steps == (2, 3, 4, 5, 6, 7, 8)
    single = [build_module_tree(data, step=step) for step in tree.step.sample.steps]
    assert totals(tree) == medians_of([totals(one) for one in single])
    durations = [one.step.duration_ns for one in single if one.step is not None]
    assert tree.step.duration_ns == np.median([took for took in durations if took is not None])
    assert tree.outside_ns == np.median([one.outside_ns or 0 for one in single])
    assert tree.optimizer.total_ns == np.median([one.optimizer.total_ns for one in single])
    shares = [one.optimizer.share or 0.0 for one in single]
    assert tree.optimizer.share == pytest.approx(np.median(shares))
    values = {node.path: node.values for _, node in iterate_nodes(tree.roots)}
    last = {node.path: node.values for _, node in iterate_nodes(single[-1].roots)}
    assert {path: values[path] for path in last} == last


def costs(data: Any, by: GroupedBy, step: int | None) -> dict[str, tuple[float, ...]]:
    table = build_op_table(data, step=step, by=by)
    return {
        f"{row.name} {phase}": (sums.ops, sums.time_ns, sums.bytes_read, sums.bytes_written, row.share or 0.0)
        for row in table.rows
        for phase in ("together", *PHASES)
        if (sums := row.sums.phase(phase)).ops
    }


@pytest.mark.parametrize("by", GROUPED_BY)
@pytest.mark.parametrize("model", MODELS)
def test_ops_have_the_medians_of_the_tables_of_their_steps(
    model: Callable[[], nn.Module], by: GroupedBy
) -> None:
    data = train(model(), ops=True, values=None).data
    single = [costs(data, by, step) for step in range(2, 9)]
    assert costs(data, by, None) == medians_of(single)


def sizes(data: Any, step: int | None) -> dict[str, tuple[float, ...]]:
    table = build_memory_table(data, step=step)
    return {
        row.name: (row.saved.ops, row.saved.saved_bytes, row.saved.recompute_bytes) for row in table.rows
    } | {
        f"{row.name} {phase}": (memory.calls, memory.allocated_bytes or 0, memory.peak_bytes or 0)
        for row in table.rows
        for phase in PHASES
        if (memory := row.phase(phase)).calls
    }


@pytest.mark.parametrize("model", MODELS)
def test_memory_has_the_medians_of_the_tables_of_its_steps(model: Callable[[], nn.Module]) -> None:
    data = train(model(), ops=True, values=None).data
    assert sizes(data, None) == medians_of([sizes(data, step) for step in range(2, 9)])


def typed(durations: Sequence[int], *, kind: str = "train", head: int | None = None) -> RecordingBuilder:
    """Steps of a root with a head, which takes all of the time but 20 ns; the optimizer steps in 10."""
    build = RecordingBuilder()
    net = build.module("", "Net")
    inner = build.module("head", "Linear", parent=net)
    for step, took in enumerate(durations):
        start = 10_000 * step
        build.step(step, start, start + took, kind=kind)
        outer = build.call(net, start, start + took - 10)
        build.call(inner, start, start + (head or took - 20), parent=outer)
        build.optimizer(start + took - 10, start + took)
    return build


def chosen(build: RecordingBuilder, **which: Any) -> tuple[int, ...]:
    return tuple(choose_steps(build.data(), **which).numbers.tolist())


def test_first_two_training_steps_are_left_out_and_the_50_newest_taken() -> None:
    assert chosen(typed([100] * 8)) == (2, 3, 4, 5, 6, 7)
    assert chosen(typed([100] * 70)) == tuple(range(20, 70))


def test_a_single_step_is_shown_where_it_is_requested_and_where_there_are_no_three() -> None:
    assert chosen(typed([100] * 8), step=4) == (4,)
    assert chosen(typed([100] * 2)) == (1,)
    assert chosen(typed([100] * 3)) == (0, 1, 2)
    assert chosen(typed([100] * 8, kind="eval")) == (7,)
    assert chosen(RecordingBuilder()) == ()


def test_requested_steps_are_also_the_first_ones_and_eval_steps() -> None:
    assert chosen(typed([100] * 8), steps="0:2") == (0, 1)
    assert chosen(typed([100] * 8), steps=slice(5, None)) == (5, 6, 7)
    assert chosen(typed([100] * 8), steps="7:") == (7,)
    assert chosen(typed([100] * 8, kind="eval"), steps="::2") == (0, 2, 4, 6)


@pytest.mark.parametrize(
    ("which", "message"),
    [
        ({"steps": "8:"}, "steps='8:' holds no step of this recording that has ended; there are: 0..7"),
        ({"steps": "5:5"}, "steps='5:5' holds no step"),
        ({"steps": "5:", "step": 5}, "steps='5:': a single step is requested too, step=5; give one of them"),
        ({"step": 8}, "no step 8 in this recording; there are: 0..7"),
    ],
)
def test_steps_that_do_not_exist_are_refused(which: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=f"^{message}"):
        choose_steps(typed([100] * 8).data(), **which)


def test_steps_that_were_compiled_ended_by_an_exception_or_called_something_else_are_left_out() -> None:
    build = typed([100] * 8)
    other = build.module("", "Critic")
    build.step(8, 80_000, 80_100)
    build.call(0, 80_000, 80_090)  # no optimizer has stepped
    build.step(9, 90_000, 90_100)
    build.call(other, 90_000, 90_090)
    build.optimizer(90_090, 90_100)
    build._rows["compilations"].append({"compilation_id": 0, "step": 4, "compile_id": "0/0", "start_ns": 0})
    assert chosen(build) == (2, 3, 5, 6, 7)


def test_steps_of_which_rows_were_dropped_are_left_out() -> None:
    build = typed([100] * 12)
    build._rows["calls"] = [row for row in build._rows["calls"] if row["step"] > 5 + (row["module_id"] == 1)]
    assert chosen(build) == (7, 8, 9, 10, 11)  # step 6 may have lost some
    build = typed([100] * 12)
    build._rows["calls"] = [
        row for row in build._rows["calls"] if row["step"] > 8 or row["module_id"] is None
    ]
    assert chosen(build, steps="0:") == (10, 11)


def test_large_steps_are_fewer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("modtrace.analysis.tables.sampled_steps._MOST_ROWS", 10)
    assert chosen(typed([100] * 20)) == (17, 18, 19)


def test_outliers_are_named_with_the_place_of_their_excess() -> None:
    tree = build_module_tree(typed([100, 100, 100, 110, 90, 310, 100, 220]).data())
    assert [(one.step, one.times, one.name, one.phase) for one in tree.outliers] == [
        (5, pytest.approx(310 / 105), "head", "forward"),
        (7, pytest.approx(220 / 105), "head", "forward"),
    ]
    outside = build_module_tree(typed([100, 100, 100, 110, 90, 310, 100], head=80).data())
    assert [(one.step, one.name) for one in outside.outliers] == [(5, "Net")]
    busy = build_module_tree(typed([100, 100, 100, 40, 30, 210, 50, 160, 90, 900]).data())
    assert [one.step for one in busy.outliers] == [
        9
    ]  # where steps differ much, twice the median is not unusual


def test_quartiles_are_those_of_numpy() -> None:
    durations = [100, 100, 130, 170, 110, 190, 120]
    tree = build_module_tree(typed(durations).data())
    assert tree.step is not None and tree.step.sample is not None
    took = tree.step.sample.duration_ns
    wanted = np.percentile(durations[2:], [0, 25, 50, 75, 100]).tolist()
    assert [took.least, took.low, took.median, took.high, took.most] == wanted
