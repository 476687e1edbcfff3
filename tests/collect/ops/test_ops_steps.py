"""In which step and call ops are, how they count there, and what becomes of them between steps, by hand."""

import threading
from collections.abc import Callable
from itertools import groupby
from typing import Any

import pytest
import torch
from torch import nn

import modtrace
from collect.ops.test_ops_tensors import op_rows


def recorded(run: Callable[[Any], object], model: object = None, **options: Any) -> modtrace.Recording:
    """The ops of a run, which is given the recording that runs."""
    torch.manual_seed(0)
    with modtrace.record(model, ops=True, values=None, strict=True, **options) as rec:
        run(rec)
    assert rec.meta.marks == ()
    return rec


def runs_of(rec: modtrace.Recording) -> list[str]:
    """Ops that ran one after the other at one place: `0 backward layer@1 x4`; `-` outside of calls or phases."""
    modules = {row["module_id"]: row for row in rec.table("modules").to_pylist()}
    calls = {row["call_id"]: row for row in rec.table("calls").to_pylist()}

    def place(op: dict[str, Any]) -> str:
        call = calls.get(op["call_id"])
        at = "-"
        if call is not None and call["module_id"] is not None:
            module = modules[call["module_id"]]
            at = f"{module['name'] or module['path']}@{call['nth']}"
        assert call is None or (call["step"], call["phase"]) == (op["step"], op["phase"])
        return f"{op['step']} {op['phase'] or '-'} {at}"

    return [f"{where} x{len([*ops])}" for where, ops in groupby(op_rows(rec), place)]


def layer(inputs: int = 2, outputs: int = 2) -> nn.Linear:
    return nn.Linear(inputs, outputs, bias=False)


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1, foreach=False)


def small_step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    optimizer.zero_grad()
    model(torch.ones(1, 4)).sum().backward()
    optimizer.step()


def test_accumulated_batches_are_one_step_and_evaluation_is_another():
    model = layer()
    optimizer = sgd(model)
    x = torch.ones(1, 2)

    def run(rec):
        for _ in range(2):
            for _ in range(2):
                model(x).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            with torch.no_grad():
                model(x).sum()

    train = [
        "forward Linear@0 x2",
        "- - x2",  # the loss
        "backward - x1",
        "backward Linear@0 x4",
        "backward - x1",  # the gradient is kept
        "forward Linear@1 x2",
        "- - x2",
        "backward - x1",
        "backward Linear@1 x4",
        "backward - x1",  # and added to
        "- - x1",  # the profiler's marks, around the optimizer's step
        "optimizer - x1",
        "- - x3",
    ]
    evaluate = ["forward Linear@0 x2", "- - x1"]
    assert runs_of(recorded(run, model)) == [
        *(f"0 {each}" for each in train),
        *(f"1 {each}" for each in evaluate),
        *(f"2 {each}" for each in train),
        *(f"3 {each}" for each in evaluate),
    ]


def test_ops_count_by_name_within_their_call():
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = layer()

        def forward(self, x):
            return self.layer(self.layer(x * 2) * 3) * 4

    model = Net()
    rec = recorded(lambda rec: [model(torch.ones(1, 2)) * 5 * 6 for _ in range(2)], model)
    found = [(row["call_id"], row["name"], row["nth"]) for row in op_rows(rec) if row["phase"] != "backward"]
    whole, first, second = (row["call_id"] for row in rec.table("calls").to_pylist() if row["step"] == 0)
    assert [each for each in found if each[0] in (whole, first, second, None)][:13] == [
        (None, "aten.ones.default", 0),
        (whole, "aten.mul.Tensor", 0),
        (first, "aten.t.default", 0),
        (first, "aten.mm.default", 0),
        (whole, "aten.mul.Tensor", 1),
        (second, "aten.t.default", 0),
        (second, "aten.mm.default", 0),
        (whole, "aten.mul.Tensor", 2),
        (None, "aten.mul.Tensor", 0),
        (None, "aten.mul.Tensor", 1),
        (None, "aten.ones.default", 0),  # in the next step, whose call is given it
        (None, "aten.mul.Tensor", 0),
        (None, "aten.mul.Tensor", 1),
    ]


def test_ops_of_the_recording_thread_are_recorded_alone_with_its_number():
    model = layer()

    def run(rec):
        thread = threading.Thread(target=lambda: model(torch.ones(7, 2)))
        thread.start()
        thread.join()
        model(torch.ones(3, 2))

    rec = recorded(run, model)
    threads = {row["thread"] for row in op_rows(rec)}
    assert [row["args"] for row in op_rows(rec) if row["name"] == "aten.ones.default"] == [
        '{"size":[3,2],"device":"cpu","pin_memory":false}'
    ]
    [last] = rec.table("calls").to_pylist()[-1:]
    assert threads == {last["thread"]}


# Ops without any module.


def test_training_without_modules_is_in_order_and_its_backward_is_joined():
    def run(rec):
        (torch.ones(2, requires_grad=True) * 2).sum().backward()

    rec = recorded(run)
    rows = rec.table("ops").to_pylist()
    assert [row["op_id"] for row in rows] == [*range(len(rows))]
    assert {row["step"] for row in rows} == {0}
    assert [row["forward_op_id"] for row in rows if row["phase"] == "backward"] == [2, 1, None]


# A batch is taken while an op runs.


@pytest.fixture(scope="module")
def running_ops():
    """Ops inside of which a module runs: on this thread, or on another one."""
    inner = layer()
    library = torch.library.Library("modtrace_tests", "FRAGMENT")

    def on_another(x):
        thread = threading.Thread(target=lambda: inner(torch.ones(1, 2)))
        thread.start()
        thread.join()
        return x + 1

    for name, run in (("runs_a_module", lambda x: inner(x) + 0), ("waits_for_a_thread", on_another)):
        library.define(f"{name}(Tensor x) -> Tensor")
        library.impl(name, run, "CPU")
    yield torch.ops.modtrace_tests
    library._destroy()


@pytest.mark.parametrize("name", ["runs_a_module", "waits_for_a_thread"])
def test_modules_that_begin_a_step_while_an_op_runs_do_not_part_it_from_what_it_reads(name, running_ops):
    def run(rec):
        x = torch.ones(1, 2)
        with torch.no_grad():
            for _ in range(3):
                x = getattr(running_ops, name)(x * 2 + 1) * 3
                rec.table("ops")  # writes what has ended

    rec = recorded(run)
    tensors = {row["tensor_id"]: row["producer_op"] for row in rec.table("tensors").to_pylist()}
    used = {use["consumer_op"]: tensors[use["tensor_id"]] for use in rec.table("uses").to_pylist()}
    assert used == {op: op - 1 for op in range(1, 13)}
    assert len(rec.table("ops")) == 13


def steps_of(rec: modtrace.Recording, name: str) -> list[int]:
    return [op["step"] for op in rec.table("ops").to_pylist() if op["name"].split(".")[1] == name]


def trained_on(
    batch_of: Callable[[int], torch.Tensor], between: Callable[[], object] = int
) -> modtrace.Recording:
    """Three steps on what a function makes of their numbers; something may follow behind each."""
    model = nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with modtrace.record(model, ops=True, strict=True) as rec:
        for step in range(3):
            model(batch_of(step)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            between()
    return rec


@pytest.mark.parametrize("with_grad", [True, False])
def test_ops_that_prepare_a_batch_between_two_steps_belong_to_the_step_that_uses_it(with_grad):
    model = nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    data, average = torch.randn(12, 4), torch.zeros(())
    with modtrace.record(model, ops=True, strict=True) as rec, torch.set_grad_enabled(with_grad):
        for step in range(3):
            part = data[4 * step : 4 * step + 4].mul(2).add(1)
            loss = model(part).square().mean()
            if with_grad:
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
            average.lerp_(loss.detach(), 0.5)  # of the step that is over
    assert steps_of(rec, "lerp_") == [0, 1, 2]
    assert steps_of(rec, "slice")[-3:] == steps_of(rec, "add")[-3:] == [0, 1, 2]
    values = rec.table("values").to_pylist()
    of_op = {op["op_id"]: op["step"] for op in rec.table("ops").to_pylist()}
    assert all(row["step"] == of_op[row["op_id"]] for row in values if row["op_id"] is not None)


def test_ops_that_write_to_parts_of_a_batch_belong_to_the_step_that_uses_it():
    def batch_of(step):
        part = torch.zeros(2, 4)
        part[0] = torch.full((4,), float(step)).sin()
        return part

    rec = trained_on(batch_of)
    assert steps_of(rec, "sin") == steps_of(rec, "zeros") == [0, 1, 2]


def test_ops_on_a_batch_that_every_step_uses_belong_to_the_step_that_is_over():
    batch = torch.randn(8, 4)
    rec = trained_on(lambda step: batch, lambda: batch[0].sin().mean())
    assert steps_of(rec, "sin") == steps_of(rec, "select") == [0, 1, 2]


class Halve(nn.Module):
    def forward(self, x):
        return x / 2


def test_ops_before_a_module_that_prepares_a_batch_belong_to_the_step_that_uses_it():
    halve = Halve()
    rec = trained_on(lambda step: halve(torch.full((2, 4), float(step)).sin()))
    assert steps_of(rec, "sin") == steps_of(rec, "div") == [0, 1, 2]
