"""What is not recorded: steps that are not selected, forks, and workers that load data."""

import os
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

import modtrace
from collect.ops.test_ops_steps import small_step
from collect.ops.test_ops_tensors import op_rows
from helpers.user_modes import SeesOps
from modtrace.collect.ops.mode import OpMode
from modtrace.collect.ops.saved_tensors import saved_in_graph


def ours_on_the_stack() -> int:
    return sum(isinstance(mode, OpMode) for mode in _get_current_dispatch_mode_stack())


def test_steps_that_are_not_selected_record_no_ops_and_have_no_mode():
    model = nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    on_stack = []
    with modtrace.record(model, strict=True, ops=True, values=None, steps="2:4") as rec:
        for _ in range(6):
            loss = model(torch.ones(1, 4)).sum()
            on_stack.append(ours_on_the_stack())
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    assert on_stack == [0, 0, 1, 1, 0, 0]
    assert {row["step"] for row in op_rows(rec)} == {2, 3}
    names = [row["name"] for row in op_rows(rec) if row["phase"] == "forward" and row["step"] == 3]
    assert names == ["aten.t.default", "aten.addmm.default"]


def test_tensors_of_a_step_after_unseen_ones_are_leaves():
    """What wrote to them was not seen, so nobody is named as their maker."""
    model = nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with modtrace.record(model, strict=True, ops=True, values=None, steps="0:3:2") as rec:
        for _ in range(3):
            small_step(model, optimizer)
    tensors = {row["tensor_id"]: row for row in rec.table("tensors").to_pylist()}
    turned = {
        row["op_id"] for row in op_rows(rec) if row["name"] == "aten.t.default" and row["phase"] == "forward"
    }
    used = [
        tensors[use["tensor_id"]]["producer_op"]
        for use in rec.table("uses").to_pylist()
        if use["consumer_op"] in turned
    ]
    assert used == [None, None]


# Forks, and workers that load data.


def in_a_fork(run: Callable[[], object]) -> int:
    """The exit code of a child process that runs something."""
    child = os.fork()
    if child == 0:
        code = 1
        try:
            run()
            code = 0
        finally:
            os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def test_fork_computes_and_records_nothing(tmp_path):
    model = nn.Linear(4, 4)

    def child() -> None:
        assert model(torch.ones(5, 4)).shape == (5, 4)

    with modtrace.record(model, to=tmp_path / "run", strict=True, ops=True, values=None) as rec:
        model(torch.ones(1, 4))
        assert in_a_fork(child) == 0
        model(torch.ones(2, 4))
    sizes = [row["args"] for row in op_rows(rec) if row["name"] == "aten.ones.default"]
    assert [each[:14] for each in sizes] == ['{"size":[1,4],', '{"size":[2,4],']


class Numbers(torch.utils.data.Dataset[torch.Tensor]):
    def __len__(self) -> int:
        return 4

    def __getitem__(self, at: int) -> torch.Tensor:
        return torch.full((4,), float(at)) * 2


def test_workers_that_load_data_work_as_ever():
    loader = torch.utils.data.DataLoader(
        Numbers(), batch_size=2, num_workers=1, multiprocessing_context="fork"
    )
    model = nn.Linear(4, 4)
    with modtrace.record(model, strict=True, ops=True, values=None) as rec:
        batches: list[Any] = []
        for batch in loader:
            batches.append(batch.tolist())
            model(batch)
    assert batches == [[[0.0] * 4, [2.0] * 4], [[4.0] * 4, [6.0] * 4]]
    assert [row["name"] for row in op_rows(rec) if row["phase"] == "forward"] == [
        "aten.t.default",
        "aten.addmm.default",
    ] * 2
    assert "aten.full.default" not in {row["name"] for row in op_rows(rec)}


def test_selected_step_is_recorded_under_a_mode_that_was_entered_before_it():
    model = nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with modtrace.record(model, strict=True, ops=True, values=None, steps="1:2") as rec:
        small_step(model, optimizer)
        with SeesOps():
            small_step(model, optimizer)
            small_step(model, optimizer)
        small_step(model, optimizer)
    recorded = {row["step"] for row in op_rows(rec)}
    assert recorded == {1} or "a dispatch mode of yours" in rec.meta.marks[0]


def test_mode_of_the_users_sees_on_when_the_step_that_is_selected_has_ended():
    """Ours cannot be taken off from below, and only passes on; it is off in the step after the user's was left."""
    model = nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with modtrace.record(strict=True, ops=True, values=None, steps="0:1") as rec:
        with SeesOps() as mode:
            small_step(model, optimizer)
            small_step(model, optimizer)
        assert ours_on_the_stack() == 1
        small_step(model, optimizer)
        assert ours_on_the_stack() == 0
    assert {row["step"] for row in op_rows(rec)} == {0}
    assert mode.seen.count("aten.addmm.default") == 2


def test_graph_of_a_step_that_is_not_kept_is_not_looked_through(monkeypatch):
    looked = []

    def look(roots, beside):
        looked.append(len(roots))
        return saved_in_graph(roots, beside)

    monkeypatch.setattr("modtrace.collect.ops.saved_memory.saved_in_graph", look)
    model = nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with modtrace.record(model, strict=True, ops=True, values=None, steps="1:2"):
        for _ in range(4):
            small_step(model, optimizer)
    assert looked == [1]
