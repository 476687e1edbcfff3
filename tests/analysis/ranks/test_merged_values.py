"""Ranks that were typed by hand: parts become the whole, copies are known, and what is missing is told."""

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from builders import RecordingBuilder, TypedRecording
from modtrace.analysis.ranks.first_nonfinite import find_first_of_ranks
from modtrace.analysis.ranks.overview import read_overview
from modtrace.analysis.ranks.replicas import check_replicas
from modtrace.analysis.tables.rank_values import OLD_NOTE
from modtrace.analysis.tables.ranks import RanksData, find_missing

Rank = tuple[int, TypedRecording]


def rank_with(numbers: Any, *, rank: int = 0, world: int = 2, steps: int = 1, **columns: Any) -> Rank:
    """A rank with the parameter `head.weight` in each step."""
    build = RecordingBuilder(rank=rank, world_size=world, complete=True)
    net = build.module("", "Net")
    head = build.module("head", "Linear", parent=net)
    for step in range(steps):
        build.step(step, 1_000 * step, 1_000 * step + 500 * (1 + rank))
        build.call(net, 1_000 * step, 1_000 * step + 100)
        flat = np.asarray(numbers, np.float64).reshape(-1).tolist()
        build.parameter(head, "weight", flat, shape=list(np.shape(numbers)), **columns)
    data = build.data()
    assert isinstance(data, TypedRecording)
    return rank, data


def rank_with_own(role: str, phase: str, numbers: list[float], rank: int) -> Rank:
    """A rank with a tensor of `head` that may be its own."""
    build = RecordingBuilder(rank=rank, world_size=2, complete=True)
    net = build.module("", "Net")
    head = build.module("head", "BatchNorm", parent=net)
    build.step(0, 0, 500)
    build.value(build.site(head, role, "mean"), numbers, phase=phase)
    return rank, build.data()


def part(whole: Any, rows: slice, rank: int, **more: Any) -> Rank:
    """A rank with some rows of a matrix."""
    numbers = whole[rows]
    place = {
        "global_shape": [*whole.shape],
        "global_offset": [rows.start, 0],
        "placements": "S(0)",
        "mesh": "2 on 0-1",
    }
    found = numbers[~np.isfinite(numbers)]
    if len(found):
        at = int(np.flatnonzero(~np.isfinite(numbers.reshape(-1)))[0])
        place["first_index"] = at
    return rank_with(numbers, rank=rank, **place, **more)


def merged_row(*ranks: Rank) -> dict[str, Any]:
    [row] = RanksData(ranks).table("values").to_pylist()
    return row


@given(st.integers(1, 5), st.integers(1, 4), st.integers(1, 4), st.data())
def test_parts_have_the_statistics_of_the_whole(
    rows: int, more: int, width: int, data: st.DataObject
) -> None:
    numbers = st.sampled_from([0.0, -1.5, 2.0, 1e3, float("inf"), float("nan")])
    size = (rows + more) * width
    whole = np.array(data.draw(st.lists(numbers, min_size=size, max_size=size))).reshape(-1, width)
    row = merged_row(part(whole, slice(0, rows), 0), part(whole, slice(rows, rows + more), 1))
    finite = whole[np.isfinite(whole)]
    assert (row["shape"], row["numel"], row["count"]) == ([*whole.shape], whole.size, whole.size)
    assert row["nan_count"] == np.isnan(whole).sum()
    assert row["inf_count"] == np.isinf(whole).sum()
    if len(finite) == whole.size:
        assert (row["min"], row["max"]) == (whole.min(), whole.max())
        assert row["sum"] == pytest.approx(whole.sum())
        assert row["sumsq"] == pytest.approx((whole**2).sum())
        assert row["first_index"] is None
    else:
        assert row["first_index"] == np.flatnonzero(~np.isfinite(whole.reshape(-1)))[0]


def test_copies_count_once_and_the_lowest_rank_is_read() -> None:
    row = merged_row(rank_with([1.0, 2.0]), rank_with([1.0, 3.0], rank=1))
    assert (row["count"], row["max"]) == (2, 2.0)


def test_rows_of_old_recordings_are_not_compared() -> None:
    old = {"note": OLD_NOTE}
    ranks = rank_with([1.0, 2.0], **old), rank_with([3.0, 4.0], rank=1, **old)
    row = merged_row(*ranks)
    assert (row["count"], row["max"]) == (None, None)
    assert row["note"] == "not comparable: the part of a DTensor, recorded without its place"
    assert check_replicas(ranks).compared == 0


def test_what_is_missing_is_marked() -> None:
    ranks = [rank_with([1.0], rank=rank, world=6, steps=2 if rank < 3 else 3) for rank in (0, 1, 2, 4)]
    missing = find_missing(ranks)
    assert missing == (3, 5)
    meta = RanksData(ranks, missing).meta
    assert meta.marks == (
        "ranks of the run are missing: 3,5",
        "tensors that rank 0 lacks are left out: 1 of rank 4",
    )
    assert not meta.complete
    overview = read_overview(ranks, missing)
    assert overview.missing == (3, 5)
    assert overview.lacking == ((0, 1), (1, 1), (2, 1))
    assert [state.steps for state in overview.ranks] == [2, 2, 2, 3]
    assert [state.step_ns for state in overview.ranks] == [500.0, 1000.0, 1500.0, 2500.0]
    assert find_missing([rank_with([1.0], world=10**12)]) == ()


def test_ranks_without_values_are_left_out() -> None:
    empty = RecordingBuilder(rank=0, world_size=2).data()
    data = RanksData([(0, empty), rank_with([1.0, 2.0], rank=1)])
    assert data.table("values").num_rows == 1
    assert data.meta.marks == ("rank 0: nothing was measured",)
    assert RanksData([(0, empty), (1, empty)]).table("values").num_rows == 0
    check = check_replicas([(0, empty), rank_with([1.0], rank=1), rank_with([1.0], rank=2)])
    assert (check.compared, check.uncompared) == (1, (0,))


def test_whole_is_not_told_from_a_part_of_its_parts() -> None:
    whole = np.arange(12.0).reshape(4, 3)
    row = merged_row(part(whole, slice(0, 1), 0), part(whole, slice(1, 3), 1))
    assert (row["shape"], row["count"]) == ([4, 3], None)
    assert row["note"] == "not comparable: parts of it are on ranks that are not read, or lack this row"


def with_evaluations(kinds: str, rank: int, *, bad: int | None = None, phase: str = "forward") -> Rank:
    """A rank with a training step for each `t`, and with one of evaluation for each `e`; `bad` is a step with NaN."""
    build = RecordingBuilder(rank=rank, world_size=2, complete=True)
    net = build.module("", "Net")
    trained = 0
    for step, kind in enumerate(kinds):
        build.step(step, 1_000 * step, 1_000 * step + 500, kind={"t": "train", "e": "eval"}[kind])
        call = build.call(net, 1_000 * step, 1_000 * step + 100)
        number = float("nan") if step == bad else float(trained)
        build.output(call, [number if phase == "forward" else 1.0])
        if kind == "t":
            build.parameter_grad(net, "weight", [number])
            build.parameter(net, "weight", [float(trained)])
            trained += 1
    return rank, build.data()


def test_rank_that_evaluates_alone_is_like_the_others() -> None:
    check = check_replicas([with_evaluations("tetteet", 0), with_evaluations("tttt", 1)])
    assert (check.compared, check.first) == (8, ())
    overview = read_overview([with_evaluations("tettee", 0), with_evaluations("tttt", 1)])
    assert overview.lacking == ((0, 1),)


def test_rank_that_evaluates_alone_is_told_when_it_makes_a_nan() -> None:
    ranks = [with_evaluations("tett", 0, bad=2), with_evaluations("ttt", 1, bad=1, phase="optimizer")]
    answers = find_first_of_ranks(ranks).answers
    assert [(answer.rank, answer.found.step) for answer in answers] == [(0, 2), (1, 1)]


def test_rank_that_has_a_nan_at_an_earlier_place_is_in_front() -> None:
    nan = float("nan")
    ranks = []
    for rank, outputs in enumerate(([1.0, nan], [nan, nan])):
        build = RecordingBuilder(rank=rank, world_size=2, complete=True)
        net = build.module("", "Net")
        build.step(0, 0, 500)
        call = build.call(net, 0, 400)
        for at, number in enumerate(outputs):
            inner = build.module(f"l{at}", "Linear", parent=net)
            build.output(build.call(inner, 10 + at, 11 + at, parent=call), [number])
        ranks.append((rank, build.data()))
    answers = find_first_of_ranks(ranks).answers
    assert [(answer.rank, answer.found.path) for answer in answers] == [(1, "l0"), (0, "l1")]


def test_rank_that_measured_nothing_is_not_called_healthy() -> None:
    empty = RecordingBuilder(rank=1, world_size=2).data()
    found = find_first_of_ranks([with_evaluations("tt", 0), (1, empty)])
    assert found == ([], [1])


def test_tensors_of_other_shapes_accuse_nobody() -> None:
    check = check_replicas([rank_with([1.0, 2.0]), rank_with([1.0, 2.0, 3.0], rank=1)])
    assert (check.compared, check.first) == (0, ())


def test_copies_are_those_of_any_two_ranks() -> None:
    """Ranks 0 and 1 have another stage of a pipeline than ranks 2 and 3."""
    ranks = []
    for rank in range(4):
        build = RecordingBuilder(rank=rank, world_size=4, complete=True)
        net = build.module("", "Net")
        build.step(0, 0, 500)
        for name in ("a", "b", "c") if rank < 2 else ("d",):
            build.parameter(build.module(name, "Linear", parent=net), "weight", [2.0 if rank == 3 else 1.0])
        ranks.append((rank, build.data()))
    check = check_replicas(ranks)
    assert check.compared == 4
    assert [(one.name, one.groups) for one in check.first] == [("d.weight", ((2,), (3,)))]


def test_what_was_not_measured_agrees_with_nothing() -> None:
    ranks = [rank_with([1.0]), rank_with([1.0], rank=1), rank_with([1.0], rank=2, count=None)]
    check = check_replicas(ranks)
    assert (check.compared, check.first, check.uncompared) == (1, (), (2,))
    assert check_replicas([rank_with([1.0], count=None), rank_with([1.0], rank=1, count=None)]).compared == 0


def test_equal_hashes_are_equal_however_the_sums_were_rounded() -> None:
    same = {"hash": b"12345678"}
    ranks = rank_with([1.0], **same), rank_with([1.0], rank=1, sum=1.0000000000000002, **same)
    check = check_replicas(ranks)
    assert (check.compared, check.by_hash, check.first) == (1, 1, ())


def test_weights_that_no_two_ranks_share_may_be_their_own() -> None:
    assert check_replicas([rank_with([1.0]), rank_with([2.0], rank=1)]).may_be_own
    numbers = [1.0, 1.0, 2.0]
    assert not check_replicas(
        [rank_with([number], rank=rank) for rank, number in enumerate(numbers)]
    ).may_be_own


@pytest.mark.parametrize(
    ("numbers", "groups", "alone"),
    [
        ([2.0, 1.0, 1.0, 1.0], ((1, 2, 3), (0,)), 0),
        ([1.0, 1.0, 2.0, 2.0], ((0, 1), (2, 3)), None),
        ([1.0, 2.0, 3.0, 1.0], ((0, 3), (1,), (2,)), None),
    ],
)
def test_ranks_with_equal_numbers_are_grouped(numbers: list[float], groups: Any, alone: int | None) -> None:
    ranks = [rank_with([number], rank=rank, world=4) for rank, number in enumerate(numbers)]
    [first] = check_replicas(ranks).first
    assert (first.groups, first.alone) == (groups, alone)


def test_a_rank_that_ended_early_hides_no_step() -> None:
    ranks = [rank_with([1.0], steps=1), rank_with([1.0], rank=1, steps=3), rank_with([2.0], rank=2, steps=3)]
    check = check_replicas(ranks)
    assert check.disagreeing_steps == (0, 1, 2)
    assert check.compared == 3


@pytest.mark.parametrize(("role", "phase"), [("buffer", "forward"), ("parameter_grad", "backward")])
def test_tensors_that_a_rank_may_have_of_its_own_accuse_nobody(role: str, phase: str) -> None:
    ranks = rank_with_own(role, phase, [1.0, 2.0], 0), rank_with_own(role, phase, [1.0, 3.0], 1)
    check = check_replicas(ranks)
    assert (check.compared, check.first) == (0, ())


def test_gradients_of_parts_of_a_batch_are_not_compared_before_they_are_reduced() -> None:
    numbers = [1.0, 2.0], [1.0, 3.0]
    row = merged_row(
        *(rank_with_own("parameter_grad", "backward", own, rank) for rank, own in enumerate(numbers))
    )
    assert (row["count"], row["shape"]) == (None, [2])
    assert row["note"] == "not comparable: the gradient of a part of the batch, before it is reduced"


@pytest.mark.parametrize(
    "losses", [(1.0, 3.0), (0.0, 0.0), (1.0, float("nan")), (2.0, float("inf")), (1e200, 3e200)]
)
def test_loss_of_a_batch_is_the_mean_of_those_of_its_parts(losses: tuple[float, float]) -> None:
    ranks = []
    for rank, loss in enumerate(losses):
        build = RecordingBuilder(rank=rank, world_size=2, complete=True)
        net = build.module("", "Net")
        build.step(0, 0, 500)
        build.output(build.call(net, 0, 100), [loss], shape=[])
        ranks.append((rank, build.data()))
    row, mean = merged_row(*ranks), np.float64(sum(losses) / 2)
    assert (row["shape"], row["count"]) == ([], 1)
    assert (row["nan_count"], row["inf_count"]) == (int(np.isnan(mean)), int(np.isinf(mean)))
    assert np.array([row["sum"], row["min"], row["max"]]) == pytest.approx([mean] * 3, nan_ok=True)
    with np.errstate(over="ignore"):
        assert row["sumsq"] == pytest.approx(mean**2, nan_ok=True)


UNKNOWN = dict.fromkeys(("min", "max", "sum"))


def test_statistics_that_a_damaged_row_lacks_are_not_known_of_all_ranks() -> None:
    whole = np.arange(8.0).reshape(4, 2)
    row = merged_row(part(whole, slice(0, 2), 0), part(whole, slice(2, 4), 1, **UNKNOWN))
    assert (row["count"], row["min"], row["max"], row["sum"]) == (8, None, None, None)


def test_mean_of_losses_of_which_a_damaged_row_lacks_one_is_not_known() -> None:
    ranks = []
    for rank, more in enumerate([{}, UNKNOWN]):
        build = RecordingBuilder(rank=rank, world_size=2, complete=True)
        net = build.module("", "Net")
        build.step(0, 0, 500)
        build.output(build.call(net, 0, 100), [1.0], shape=[], **more)
        ranks.append((rank, build.data()))
    assert merged_row(*ranks)["count"] is None


def test_outputs_with_other_dimensions_on_each_rank_are_not_compared() -> None:
    ranks = []
    for rank, (numbers, shape) in enumerate([([1.0], []), ([1.0, 2.0], [2])]):
        build = RecordingBuilder(rank=rank, world_size=2, complete=True)
        net = build.module("", "Net")
        build.step(0, 0, 500)
        build.output(build.call(net, 0, 100), numbers, shape=shape)
        ranks.append((rank, build.data()))
    row = merged_row(*ranks)
    assert row["note"] == "not comparable: other ranks have a tensor with another number of dimensions here"
    assert row["count"] is None


def split_ranks(masks: dict[int, list[float]], *, inner: bool = False, parts: bool = False) -> list[Rank]:
    """Ranks of tensor parallelism, with the output of their dropout: behind a layer split by rows, or before it."""
    ranks = []
    for rank, mask in masks.items():
        build = RecordingBuilder(rank=rank, world_size=len(masks), complete=True)
        net = build.module("", "Net")
        layers = {
            name: build.module(name, "Layer", parent=net) for name in ("norm", "up", "inner", "down", "drop")
        }
        build.step(0, 0, 500)
        root = build.call(net, 0, 100)
        given = [1.0, 2.0 + rank * parts]
        outputs = {"norm": given, "up": [3.0, rank], "inner": mask if inner else [3.0, rank], "down": None,
                   "drop": given if inner else mask}  # fmt: skip
        for at, (name, numbers) in enumerate(outputs.items()):
            build.output(build.call(layers[name], at, at + 1, parent=root, nth=0), numbers)
        build.parameter(layers["norm"], "weight", [1.0, 1.0])
        for name, dimension in (("up", 0), ("down", 1)):
            build.parameter(
                layers[name], "weight", [1.0, rank], shape=[2, 1], global_shape=[4, 1],
                global_offset=[2 * rank, 0], placements=f"S({dimension})", mesh="tp=2 on 0-1",
            )  # fmt: skip
        ranks.append((rank, build.data()))
    return ranks


def test_dropout_of_ranks_that_had_equal_numbers_is_named() -> None:
    split = check_replicas(split_ranks({0: [0.0, 2.0], 1: [1.0, 0.0], 2: [0.0, 2.0]})).split_output
    assert split is not None
    assert (split.name, split.step, split.groups) == ("drop", 0, ((0,), (1,)))


@pytest.mark.parametrize("how", [{"inner": True}, {"parts": True}])
def test_dropout_of_parts_accuses_nobody(how: dict[str, bool]) -> None:
    assert check_replicas(split_ranks({0: [0.0, 2.0], 1: [1.0, 0.0]}, **how)).split_output is None


def test_equal_dropout_accuses_nobody() -> None:
    assert check_replicas(split_ranks({0: [0.0, 2.0], 1: [0.0, 2.0]})).split_output is None
